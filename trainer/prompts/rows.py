"""Files -> validated rows. All problems of all files are raised together before anything else starts."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from trainer.prompts import fields
from trainer.prompts.errors import FieldProblem, Problems
from trainer.prompts.files import FileFacts, fingerprint, plain, read_jsonl, read_parquet
from trainer.prompts.ids import SeenIds
from trainer.prompts.row import Message, Row
from trainer.reward.spec import KNOWN_DOMAINS, SCORED_DOMAINS, DomainSpec

__all__ = ["Message", "Row", "RowList", "load_rows"]

CUSTOM = "custom"  # the domain of rows that only the user's own reward function knows
BUILTIN_TAGS = {
    "openai/gsm8k": "math_rule",
    "lighteval/MATH": "math_rule",
    "math_dapo": "math_rule",
    "aime*": "math_rule",
    "codecontests": "code_sandbox",
    "apps": "code_sandbox",
    "codeforces": "code_sandbox",
    "taco": "code_sandbox",
}
KNOWN_COLUMNS = {
    *("id", "messages", "prompt", "tag", "domain", "ground_truth", "case_type", "test_cases", "test_case_function"),
    *("difficulty", "source", "extra_info", "data_source", "ability", "reward_model"),
}
CONSUMED = KNOWN_COLUMNS - {"prompt", "test_case_function", "extra_info", "reward_model"}


class RowList(list[Row]):
    """The rows in file order, with what was found in each file (`files`: name -> FileFacts)."""

    def __init__(self, rows: Iterable[Row], files: dict[str, FileFacts]) -> None:
        super().__init__(rows)
        self.files = files


def load_rows(
    files: list[str],
    *,
    domains: Mapping[str, DomainSpec],
    dataset_dir: str | Path | None = None,
    prompt_key: str = "prompt",
    reward_fn_key: str = "data_source",
    custom_reward: bool = False,
    scorers: Collection[str] = SCORED_DOMAINS,
    max_samples: int = -1,
    missing_id: Literal["error", "line"] = "error",
    duplicate_ids: Literal["error", "first"] = "error",
    max_line_bytes: int = 16 << 20,
    max_reported_errors: int = 20,
    files_key: str = "data.train_files",
) -> RowList:
    """Read and check all files; the first `max_samples` rows when that is not negative.

    Relative names resolve under `dataset_dir`. `custom_reward` means that the user's function scores
    every row: tags need no domain then and reference answers are optional. `scorers` are the domains
    that can be scored; rows of others are refused. `files_key` is the setting named in messages.

    Files are read twice: first to find every problem in memory far below their size, then to keep the rows; once
    more where ids repeat.
    Raises DataError (a ValueError) with up to `max_reported_errors` lines.
    """
    files = [files] if isinstance(files, str) else list(files)
    reader = _Reader(
        base=None if dataset_dir is None else Path(dataset_dir),
        lookup=DomainLookup(domains, custom_reward),
        prompt_key=prompt_key,
        reward_fn_key=reward_fn_key,
        custom_reward=custom_reward,
        scorers=scorers,
        missing_id=missing_id,
        duplicate_ids=duplicate_ids,
        max_line_bytes=max_line_bytes,
        files_key=files_key,
        problems=Problems(max_reported_errors),
    )
    stop = None if max_samples < 0 else max_samples
    while True:
        for _ in islice(reader.rows(files), stop):
            pass
        if not reader.ids.finish_pass():
            break
        reader.reset()
    reader.problems.raise_if_any()
    facts = reader.facts
    reader.reset()
    kept = RowList(islice(reader.rows(files), stop), facts)
    reader.problems.raise_if_any()
    return kept


class DomainLookup:
    """Tag -> domain. No silent default; one tag in two domains is a configuration error."""

    def __init__(self, domains: Mapping[str, DomainSpec], custom_reward: bool) -> None:
        self.domains = set(KNOWN_DOMAINS) | set(domains)
        self.custom_reward = custom_reward
        self.by_tag: dict[str, str] = {}
        for domain, spec in domains.items():
            for tag in spec.tags:
                other = self.by_tag.setdefault(tag, domain)
                if other != domain:
                    raise ValueError(
                        f"got tag {tag!r} in rewards.{other}.tag_included and rewards.{domain}.tag_included; "
                        "expected it in one domain; delete one of the two"
                    )
        self.shown = sorted(set(domains) | set(self.by_tag)) or sorted(SCORED_DOMAINS)

    def find(self, tag: str, explicit: Any) -> str:
        if fields.absent(explicit) is None:
            if explicit in self.domains:
                return explicit
            if not self.custom_reward:
                raise self._unknown("domain", str(explicit), sorted(self.domains))
        if tag in self.domains:
            return tag
        if tag in self.by_tag:
            return self.by_tag[tag]
        for pattern, domain in BUILTIN_TAGS.items():
            if fnmatch.fnmatchcase(tag, pattern):
                return domain
        if self.custom_reward:
            return CUSTOM
        raise self._unknown("tag", tag, self.shown)

    @staticmethod
    def _unknown(name: str, got: str, choices: list[str]) -> FieldProblem:
        lowered = {choice.lower(): choice for choice in choices}
        near = difflib.get_close_matches(got.lower(), lowered, n=1)
        hint = f" (nearest: {lowered[near[0]]})" if near else ""
        expected = f"one of {', '.join(choices)}{hint}"
        return FieldProblem(
            "D11", name, f"'{got}'", expected, f"Fix the {name} or add it to rewards.<domain>.tag_included"
        )


@dataclass
class _Reader:
    base: Path | None
    lookup: DomainLookup
    prompt_key: str
    reward_fn_key: str
    custom_reward: bool
    scorers: Collection[str]
    missing_id: str
    duplicate_ids: str
    max_line_bytes: int
    files_key: str
    problems: Problems
    facts: dict[str, FileFacts] = field(default_factory=dict)
    ids: SeenIds = field(default_factory=SeenIds)
    refused: set[tuple[str, str]] = field(default_factory=set)

    def reset(self) -> None:
        self.facts, self.refused, self.problems = {}, set(), Problems(self.problems.limit)

    def rows(self, files: list[str]) -> Iterator[Row]:
        for name in files:
            facts = FileFacts(name, self.base / name if self.base else Path(name))
            try:
                self._check_file(facts)
            except FieldProblem as problem:
                self.problems.add(problem, name)
                continue
            self.facts[name] = facts
            yield from self._rows_of(facts)

    def _check_file(self, facts: FileFacts) -> None:
        if facts.path.is_dir():
            raise FieldProblem("D02", None, "a folder", ".jsonl or .parquet", "Name the files in it")
        if "," in facts.name and not facts.path.exists():
            as_list = ",".join(part.strip() for part in facts.name.split(","))
            raise FieldProblem("D01", None, "names joined by commas", "a list", f"Write {self.files_key}=[{as_list}]")
        if facts.path.suffix not in (".jsonl", ".parquet"):
            got = facts.path.suffix or "no suffix"
            raise FieldProblem("D02", None, got, ".jsonl or .parquet", "Convert the file")
        try:
            fingerprint(facts)
        except OSError as error:
            base = "null" if self.base is None else self.base
            expected = f"a readable .jsonl or .parquet file under data.dataset_dir={base}"
            raise FieldProblem("D01", None, str(error.strerror), expected, f"Check {self.files_key}") from None

    def _rows_of(self, facts: FileFacts) -> Iterator[Row]:
        parquet = facts.path.suffix == ".parquet"
        if parquet:
            records = read_parquet(facts, self.prompt_key, self.reward_fn_key, self.custom_reward, self.problems)
        else:
            records = read_jsonl(facts, self.max_line_bytes, self.problems)
        before = self.problems.total
        for line, record in records:
            facts.rows += 1
            facts.note(record)
            row = self._row(facts, line, record, parquet)
            if row is not None:
                yield row
        if facts.rows == 0 and self.problems.total == before:
            problem = FieldProblem("D03", None, "0 rows", "at least 1", "Fill the file or remove it from the list")
            self.problems.add(problem, facts.name)

    def _row(self, facts: FileFacts, line: int, record: dict[str, Any], parquet: bool) -> Row | None:
        """The typed row, or None when it has a problem or is a dropped duplicate."""
        before = self.problems.total

        def check(function: Callable[..., Any], *arguments: Any) -> Any:
            try:
                return function(*arguments)
            except FieldProblem as problem:
                self.problems.add(problem, facts.name, line)
                return None

        tag = check(fields.parse_tag, record, self.reward_fn_key, parquet)
        domain = None if tag is None else check(self._domain, facts.name, tag, record.get("domain"))
        needs = None if self.custom_reward else domain
        row_id = check(fields.parse_id, record, line, facts.name, parquet, self.missing_id)
        messages = check(fields.parse_messages, record, self.prompt_key)
        truth = check(fields.parse_ground_truth, record, needs)
        style = check(fields.parse_style, record, needs)
        case_type, cases = check(fields.parse_cases, record, needs) or ("", ())
        difficulty, difficulty_text = check(fields.parse_difficulty, record) or (None, "")
        if tag is not None and row_id is not None and not self._is_first(facts, line, tag, row_id):
            return None
        if self.problems.total > before:
            return None
        return Row(
            id=row_id,
            tag=tag,
            domain=domain,
            messages=messages,
            ground_truth=truth,
            style=style,
            cases=cases,
            case_type=case_type,
            difficulty=difficulty,
            difficulty_text=difficulty_text,
            source=str(record.get("source") or ""),
            ability=str(record.get("ability") or ""),
            extra=self._extra(facts, record),
            origin=(facts.name, line),
        )

    def _domain(self, file: str, tag: str, explicit: Any) -> str:
        domain = self.lookup.find(tag, explicit)
        if not self.custom_reward and domain not in self.scorers and (file, tag) not in self.refused:
            self.refused.add((file, tag))  # once per file and tag: the same line for every row would hide the rest
            got = f"'{tag}' of domain {domain}, which has no scorer"
            expected = f"a domain with a scorer: {', '.join(sorted(self.scorers))}"
            self.problems.add(
                FieldProblem(
                    "D33", "tag", got, expected, "Remove these rows or set reward.custom_reward_function.path"
                ),
                file,
            )
        return domain

    def _is_first(self, facts: FileFacts, line: int, tag: str, row_id: str) -> bool:
        first = self.ids.first_place(tag, row_id, (facts.name, line))
        if first == (facts.name, line):
            return True
        if self.duplicate_ids == "first":
            facts.duplicates_dropped += 1
        else:
            got = f"'{row_id}', first seen at {first[0]}:{first[1]}"
            problem = FieldProblem("D13", "id", got, "unique id per tag", "Rename, or set data.duplicate_ids=first")
            self.problems.add(problem, facts.name, line)
        return False

    def _extra(self, facts: FileFacts, record: dict[str, Any]) -> dict[str, Any]:
        known = KNOWN_COLUMNS | {self.prompt_key, self.reward_fn_key}
        facts.unknown_columns.update(record.keys() - known)
        used = CONSUMED | {self.reward_fn_key} | (set() if "messages" in record else {self.prompt_key})
        extra = {name: plain(value) for name, value in record.items() if name not in used and value is not None}
        rest = {k: v for k, v in extra.pop("reward_model", {}).items() if k not in ("style", "ground_truth")}
        return {**extra, "reward_model": rest} if rest else extra
