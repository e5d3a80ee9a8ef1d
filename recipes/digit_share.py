"""Reward of the tiny recipes: the share of digits in an answer. A random model gets some and can learn it at once."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    digits = sum(character.isdigit() for character in solution_str)
    share = digits / max(1, len(solution_str))
    return {"score": share, "acc": float(solution_str.strip() == ground_truth), "digits": share}
