"""The parts of the math scorer: candidate, clean, numbers, structure, symbolic. Used by reward/math_rule.py."""
