"""PromptMasker: marks the tokens of a conversation that are read and not learned."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from ibm_nodes.items import Document
from ibm_nodes.node import Node, Snapshot, draw, render, snapshot
from ibm_nodes.state import State, check_keys, check_settings


class PromptMasker(Node[Document]):
    """Masks the prompts of documents: all tokens but those between the markers of a response and of the next prompt.

    A masked token stands as its complement ``~token``, which is negative: it is packed, cut and saved like any other,
    and ``CausalLMCollator`` gives it back, with the label -100. Markers are masked themselves; what ends a response,
    such as an end-of-turn token, comes before the next marker and is learned. A document without a response is masked
    throughout, and counted in the state.

    Args:
        source: node of documents.
        response_ids: ids that open a response, such as those of ``<|im_start|>assistant`` and the end of the line.
        prompt_ids: ids that open the next prompt, such as that of ``<|im_start|>``; None: a response goes on to the end
            of the document.

    Raises:
        ValueError: if there are no ids or one is negative.
    """

    RESPONSE_KEY = "response_ids"
    PROMPT_KEY = "prompt_ids"
    UNANSWERED_KEY = "unanswered"
    SOURCE_KEY = "source"

    def __init__(
        self, source: BaseNode[Document], *, response_ids: Sequence[int], prompt_ids: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        for name, ids in (("response_ids", response_ids), ("prompt_ids", prompt_ids)):
            if ids is not None and (not len(ids) or min(ids) < 0):
                raise ValueError(f"{name} must be ids of 0 or more, at least one, got {list(ids)}")
        self.source = source
        self.response_ids = tuple(response_ids)
        self.prompt_ids = None if prompt_ids is None else tuple(prompt_ids)

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        self._unanswered = 0
        if initial_state is None:
            self.source.reset(None)
            return
        keys = (self.RESPONSE_KEY, self.PROMPT_KEY, self.UNANSWERED_KEY, self.SOURCE_KEY)
        check_keys(self, initial_state, keys)
        check_settings(self, initial_state, response_ids=self.response_ids, prompt_ids=self.prompt_ids)
        self._unanswered = initial_state[self.UNANSWERED_KEY]
        self.source.reset(initial_state[self.SOURCE_KEY])

    def next(self) -> Document:
        return self.draw(1)[0]

    def draw(self, num_tokens: int, extra: int = 0) -> list[Document]:
        return [
            document._replace(tokens=self._mask(document.tokens)) for document in draw(self.source, num_tokens, extra)
        ]

    def snapshot(self) -> Snapshot:
        return _state, (self.response_ids, self.prompt_ids, self._unanswered, snapshot(self.source))

    def _mask(self, tokens: np.ndarray) -> np.ndarray:
        begins = _find(tokens, self.response_ids) + len(self.response_ids)
        self._unanswered += not len(begins) and len(tokens) > 0
        masked = ~tokens.astype(np.promote_types(tokens.dtype, np.int32))
        prompts = np.empty(0, np.int64) if self.prompt_ids is None else _find(tokens, self.prompt_ids)
        ends = np.append(prompts, len(tokens))
        for begin in begins:
            end = ends[np.searchsorted(ends, begin)]
            masked[begin:end] = tokens[begin:end]
        return masked


def _find(tokens: np.ndarray, ids: tuple[int, ...]) -> np.ndarray:
    """Gives the positions at which some ids stand in a row."""
    at = np.flatnonzero(tokens[: len(tokens) - len(ids) + 1] == ids[0]) if len(tokens) >= len(ids) else np.empty(0, int)
    for offset, token in enumerate(ids[1:], start=1):
        at = at[tokens[at + offset] == token]
    return at


def _state(
    response_ids: tuple[int, ...], prompt_ids: tuple[int, ...] | None, unanswered: int, source: Snapshot
) -> dict[str, Any]:
    return {
        PromptMasker.RESPONSE_KEY: response_ids,
        PromptMasker.PROMPT_KEY: prompt_ids,
        PromptMasker.UNANSWERED_KEY: unanswered,
        PromptMasker.SOURCE_KEY: render(source),
    }
