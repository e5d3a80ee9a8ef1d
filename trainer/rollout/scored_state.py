"""Scored samples as JSON, for those that wait in a checkpoint."""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engines.base import Sample
from trainer.prompts import Message, PromptItem, Row
from trainer.reward import RewardResult
from trainer.rollout.scored import Scored


def to_json(scored: Scored) -> dict[str, Any]:
    """Dicts, lists and scalars; routes [rows, layers, K] int16 as base64."""
    sample = {**asdict(replace(scored.sample, routes=None)), "routes": _pack(scored.sample.routes)}
    result = {**vars(scored.result), "extra": dict(scored.result.extra)}
    item = asdict(scored.item)
    item["row"]["messages"] = [list(message) for message in scored.item.row.messages]
    return {"item": item, "sample": sample, "text": scored.text, "result": result, "routable": scored.routable}


def from_json(state: dict[str, Any]) -> Scored:
    """Inverse of `to_json`, also after a trip through a JSON file."""
    row = state["item"]["row"] | {
        "messages": tuple(Message(*message) for message in state["item"]["row"]["messages"]),
        "cases": tuple(state["item"]["row"]["cases"]),
        "origin": tuple(state["item"]["row"]["origin"]),
    }
    item = state["item"] | {"row": Row(**row), "token_ids": tuple(state["item"]["token_ids"])}
    sample = state["sample"] | {
        "prompt_ids": tuple(state["sample"]["prompt_ids"]),
        "routes": _unpack(state["sample"]["routes"]),
    }
    result = RewardResult(**state["result"])
    return Scored(PromptItem(**item), Sample(**sample), state["text"], result, state["routable"])


def _pack(routes: Tensor | None) -> dict[str, Any] | None:
    if routes is None:
        return None
    data = routes.to(torch.int16).contiguous().numpy().astype("<i2").tobytes()
    return {"shape": list(routes.shape), "data": b64encode(data).decode()}


def _unpack(state: dict[str, Any] | None) -> Tensor | None:
    if state is None:
        return None
    values = np.frombuffer(b64decode(state["data"]), dtype="<i2").astype(np.int16)
    return torch.from_numpy(values).reshape(state["shape"])
