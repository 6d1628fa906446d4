"""What the scheduler may use, and which requests fit into that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from peg.errors import InvalidRequest
from peg.plan import EngineInfo, GroupCapacity, SequenceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The numbers that the scheduler keeps to, for one epoch.

    `max_num_seqs` is the number of rows. `max_num_queued_reqs` is how many may wait beyond those that a free row
    is there for, and `max_num_queued_tokens` how many tokens these may have, None for any number. Without `priorities`
    every request has the same one.
    """

    block_size: int
    groups: tuple[GroupCapacity, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = field(default=frozenset())
    forbidden_token_ids: frozenset[int] = field(default=frozenset())
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    priorities: bool = False
    epoch: int = 0
    max_in_flight: int = 2

    @classmethod
    def of(
        cls,
        info: EngineInfo,
        max_num_queued_reqs: int | None = None,
        epoch: int = 0,
        *,
        max_num_queued_tokens: int | None = None,
        priorities: bool = False,
    ) -> SchedulerLimits:
        """The limits of a loaded engine."""
        return cls(
            block_size=info.block_size,
            groups=info.groups,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=frozenset(info.eos_token_ids),
            forbidden_token_ids=frozenset(info.forbidden_token_ids),
            max_num_queued_reqs=max_num_queued_reqs,
            max_num_queued_tokens=max_num_queued_tokens,
            priorities=priorities,
            epoch=epoch,
        )

    def max_tokens(self, request: SequenceRequest) -> int:
        """How many tokens the request may sample at most. Raises InvalidRequest where the context has no room."""
        granted = self._grant(request)
        if request.sampling.min_tokens > granted:
            raise InvalidRequest(
                f"min_tokens {request.sampling.min_tokens}: at most {granted} tokens are sampled", "min_tokens"
            )
        return granted

    def _grant(self, request: SequenceRequest) -> int:
        prompt, wanted = len(request.prompt_ids), request.max_tokens
        left = self.max_model_len - prompt
        context = f"the context is {self.max_model_len} tokens"
        if prompt == 0:
            raise InvalidRequest("the prompt is empty: it must have at least one token", "prompt")
        if wanted is None:
            if left < 1:
                raise InvalidRequest(f"the prompt has {prompt} tokens: {context}, one of them to sample", "prompt")
            return left
        if wanted < 0:
            raise InvalidRequest(f"max_tokens {wanted}: must be at least 0", "max_tokens")
        if wanted > left:
            raise InvalidRequest(
                f"the prompt has {prompt} tokens and max_tokens is {wanted}, together {prompt + wanted}: {context}",
                "max_tokens" if left > 0 else "prompt",
            )
        return wanted

    @property
    def bounds_queue(self) -> bool:
        """Whether there is a limit to what may wait."""
        return self.max_num_queued_reqs is not None or self.max_num_queued_tokens is not None

    def excess(self, waiting: Sequence[int]) -> str | None:
        """What is too much where sequences of so many tokens each wait; None where all of them may."""
        most, most_tokens, tokens = self.max_num_queued_reqs, self.max_num_queued_tokens, sum(waiting)
        if most is not None and len(waiting) > most:
            return f"{len(waiting)} sequences would wait: at most {most} may (--max-num-queued-reqs)"
        if most_tokens is not None and tokens > most_tokens:
            return f"{tokens} tokens would wait: at most {most_tokens} may (--max-num-queued-tokens)"
        return None

    def check_priority(self, request: SequenceRequest) -> None:
        """Raises InvalidRequest for a priority that would change nothing."""
        if request.priority != 0 and not self.priorities:
            raise InvalidRequest(
                f"priority {request.priority}: only 0, without --scheduling-policy priority", "priority"
            )

    def check_ids(self, request: SequenceRequest) -> None:
        """Raises InvalidRequest for an id that the model has not, or that a prompt may not hold."""
        self.check_rules(request)
        for name, ids in (("prompt", request.prompt_ids), ("stop_token_ids", request.stop_token_ids)):
            if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
                bad = next(token for token in ids if not 0 <= token < self.vocab_size)
                raise InvalidRequest(f"{name}: token id {bad} is not in 0 to {self.vocab_size - 1}", name)
        if not self.forbidden_token_ids.isdisjoint(request.prompt_ids):
            place, bad = next(
                (place, token) for place, token in enumerate(request.prompt_ids) if token in self.forbidden_token_ids
            )
            raise InvalidRequest(f"prompt: token id {bad} at position {place} may not be in a prompt", "prompt")

    def check_rules(self, request: SequenceRequest) -> None:
        """Raises InvalidRequest for rules about tokens that the model has not, or that leave none to sample.

        Of a bad word the last token counts as banned for good, so that no row of logits is ever empty.
        """
        rules = request.sampling
        allowed = rules.allowed_token_ids
        named = {
            "logit_bias": {token for token, _ in rules.logit_bias},
            "allowed_token_ids": allowed or frozenset(),
            "bad_words": {token for word in rules.bad_words for token in word},
        }
        for name, ids in named.items():
            if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
                raise InvalidRequest(f"{name}: a token id is not in 0 to {self.vocab_size - 1}", name)
        if allowed is None and not rules.bad_words:
            return
        banned = self.forbidden_token_ids.union(word[-1] for word in rules.bad_words)
        if rules.min_tokens:
            banned |= request.stop_token_ids | self.eos_token_ids
        left = len(allowed - banned) if allowed is not None else self.vocab_size - len(banned)
        if left <= 0:
            raise InvalidRequest(
                "allowed_token_ids, bad_words and min_tokens together leave no token to sample",
                "bad_words" if allowed is None else "allowed_token_ids",
            )
