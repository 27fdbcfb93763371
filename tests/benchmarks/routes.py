"""Other ways to the same numbers, each as its users would go it: what ours is measured against.

Every route gives the observation (effective rank and induction attention of every head) and the target's
log-probability with some heads' outputs set to zero. All of them run the model with eager attention, since all of them
read the attention matrix.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from spectral_monitor.heads import Head
from spectral_monitor.probe import ProbeBatch
from tests.architectures.textbook import rank_by_svd


class Route(Protocol):
    """One way to look at a model."""

    name: str

    def observe(self, probe: ProbeBatch, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """[K] effective ranks and [K] induction attention."""

    def without(self, heads: Iterable[Head], probe: ProbeBatch, batch_size: int) -> np.ndarray:
        """[N] log-probability of the target with ``heads`` out."""


def eager_copy(model: Any) -> Any:
    """The same weights with eager attention."""
    copied = copy.deepcopy(model)
    copied.set_attn_implementation("eager")
    return copied.eval()


def projections(model: Any) -> dict[str, nn.Module]:
    """Output projections of GPT-2, GPT-NeoX and Llama-like models, in order of layers."""
    names = ("self_attn.o_proj", "attn.c_proj", "attention.dense")
    return {name: module for name, module in model.named_modules() if name.endswith(names)}


def effective_ranks(outputs: Tensor) -> np.ndarray:
    """One SVD a head: [N, L, H, D] -> [L H]."""
    return np.array([rank_by_svd(head) for layer in outputs.permute(1, 2, 0, 3) for head in layer])


class _Gathered:
    """Rows of one observation, micro-batch by micro-batch."""

    def __init__(self, probe: ProbeBatch, batch_size: int) -> None:
        self.batches = [
            (
                torch.from_numpy(probe.tokens[start : start + batch_size]),
                torch.from_numpy(probe.targets["induction"][start : start + batch_size, 0]),
                torch.from_numpy(probe.target[start : start + batch_size]),
            )
            for start in range(0, probe.rows, batch_size)
        ]
        self.attention: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def add(self, rows: list[Tensor], outputs: list[Tensor]) -> None:
        """[B, H] attention and [B, H, D] outputs of every layer."""
        self.attention.append(torch.stack(rows, dim=1))
        self.outputs.append(torch.stack(outputs, dim=1))

    def numbers(self) -> tuple[np.ndarray, np.ndarray]:
        attention = torch.cat(self.attention).double().mean(0).flatten().numpy()
        return effective_ranks(torch.cat(self.outputs)), attention


def _target_logprob(logits: Tensor, target: Tensor) -> np.ndarray:
    return np.asarray(logits.float().log_softmax(-1).gather(-1, target[:, None])[:, 0].double())


class PapersProtocol:
    """The papers' protocol as it is described: eager attentions in one pass, head outputs in another, all logits, one
    SVD a head, one full pass a condition."""

    name = "papers' protocol"

    def __init__(self, model: Any) -> None:
        self.model = eager_copy(model)
        self.heads: int = model.config.num_attention_heads

    @torch.no_grad()
    def observe(self, probe: ProbeBatch, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        gathered = _Gathered(probe, batch_size)
        rows: list[list[Tensor]] = []
        for tokens, targets, _ in gathered.batches:
            found = self.model(tokens, output_attentions=True, use_cache=False).attentions
            index = torch.arange(len(tokens))
            rows.append([layer[index, :, -1, targets] for layer in found])
        kept: list[Tensor] = []
        hooks = [p.register_forward_pre_hook(lambda _, a: kept.append(a[0][:, -1])) for p in self._projections()]
        try:
            for (tokens, _, _), attention in zip(gathered.batches, rows, strict=True):
                kept.clear()
                self.model(tokens, use_cache=False)
                gathered.add(attention, [k.view(len(k), self.heads, -1) for k in kept])
        finally:
            for hook in hooks:
                hook.remove()
        return gathered.numbers()

    @torch.no_grad()
    def without(self, heads: Iterable[Head], probe: ProbeBatch, batch_size: int) -> np.ndarray:
        def silence(numbers: list[int]) -> Any:
            def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                outputs = args[0].clone()
                outputs.view(*outputs.shape[:2], self.heads, -1)[:, :, numbers] = 0
                return (outputs, *args[1:])

            return hook

        hooks = [
            self._projections()[layer].register_forward_pre_hook(silence(numbers))
            for layer, numbers in by_layer(heads).items()
        ]
        try:
            return np.concatenate(
                [
                    _target_logprob(self.model(tokens, use_cache=False).logits[:, -1], target)
                    for tokens, _, target in _Gathered(probe, batch_size).batches
                ]
            )
        finally:
            for hook in hooks:
                hook.remove()

    def _projections(self) -> list[nn.Module]:
        return list(projections(self.model).values())


class TransformerLens:
    """TransformerLens 4: ``run_with_cache`` and ``run_with_hooks`` on its bridge, only what is needed cached."""

    name = "TransformerLens"

    def __init__(self, model: Any) -> None:
        from transformer_lens.model_bridge.sources.transformers import boot

        self.heads: int = model.config.num_attention_heads
        self.layers: int = model.config.num_hidden_layers
        with _any_tokenizer(model.config.vocab_size) as tokenizer:
            self.bridge = boot("local/model", hf_model=eager_copy(model), tokenizer=tokenizer)

    @torch.no_grad()
    def observe(self, probe: ProbeBatch, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        gathered = _Gathered(probe, batch_size)
        for tokens, targets, _ in gathered.batches:
            _, cache = self.bridge.run_with_cache(
                tokens, names_filter=lambda name: name.endswith(("hook_pattern", "hook_z"))
            )
            index = torch.arange(len(tokens))
            gathered.add(
                [cache[f"blocks.{n}.attn.hook_pattern"][index, :, -1, targets] for n in range(self.layers)],
                [
                    cache[f"blocks.{n}.attn.hook_z"][:, -1].reshape(len(tokens), self.heads, -1)
                    for n in range(self.layers)
                ],
            )
        return gathered.numbers()

    @torch.no_grad()
    def without(self, heads: Iterable[Head], probe: ProbeBatch, batch_size: int) -> np.ndarray:
        def silence(numbers: list[int]) -> Any:
            def hook(z: Tensor, hook: Any) -> Tensor:
                z = z.clone()
                z.view(*z.shape[:2], self.heads, -1)[:, :, numbers] = 0
                return z

            return hook

        hooks = [(f"blocks.{n}.attn.hook_z", silence(numbers)) for n, numbers in by_layer(heads).items()]
        return np.concatenate(
            [
                _target_logprob(self.bridge.run_with_hooks(tokens, fwd_hooks=hooks)[:, -1], target)
                for tokens, _, target in _Gathered(probe, batch_size).batches
            ]
        )

    def detect(self, probe: ProbeBatch) -> np.ndarray:
        """[K] induction attention by TransformerLens's own head detector, which takes one prompt at a time.

        Its score divides the attention on the pattern, here one query and its target, by all attention of the prompt,
        T rows that sum to one: T times the score is the attention mass.
        """
        from transformer_lens.head_detector import detect_head

        self.bridge.to_tokens = lambda tokens: tokens  # ids are given, there is nothing to tokenise
        self.bridge.cfg.n_ctx = probe.length + 1  # it refuses a prompt that fills the context
        total = np.zeros(self.layers * self.heads)
        for tokens, (target,) in zip(probe.tokens, probe.targets["induction"][:, :1], strict=True):
            pattern = torch.zeros(probe.length, probe.length)
            pattern[-1, int(target)] = 1
            scores = detect_head(self.bridge, torch.from_numpy(tokens)[None], pattern)
            total += probe.length * scores.double().flatten().numpy()
        return np.asarray(total / probe.rows)


class NNsight:
    """nnsight 0.8: one trace an observation, one a condition; slices taken inside, the last logit only."""

    name = "nnsight"

    def __init__(self, model: Any) -> None:
        from nnsight import NNsight as Wrapped

        self.heads: int = model.config.num_attention_heads
        eager = eager_copy(model)
        self.places = [name.split(".") for name in projections(eager)]
        self.wrapped = Wrapped(eager)

    @torch.no_grad()
    def observe(self, probe: ProbeBatch, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        gathered = _Gathered(probe, batch_size)
        projections = [self._find(place) for place in self.places]
        attentions = [self._find(place[:-1]) for place in self.places]
        for tokens, targets, _ in gathered.batches:
            index = torch.arange(len(tokens))
            with self.wrapped.trace(tokens, use_cache=False, logits_to_keep=1):
                rows, outputs = list().save(), list().save()
                for projection, attention in zip(projections, attentions):  # noqa: B905 traced as it stands
                    outputs.append(projection.input[:, -1])
                    rows.append(attention.output[1][index, :, -1, targets])
            gathered.add(list(rows), [o.view(len(tokens), self.heads, -1) for o in outputs])
        return gathered.numbers()

    @torch.no_grad()
    def without(self, heads: Iterable[Head], probe: ProbeBatch, batch_size: int) -> np.ndarray:
        ablated = [(self._find(self.places[n]), numbers) for n, numbers in by_layer(heads).items()]
        found = []
        for tokens, _, target in _Gathered(probe, batch_size).batches:
            with self.wrapped.trace(tokens, use_cache=False, logits_to_keep=1):
                for projection, numbers in ablated:
                    value = projection.input
                    value.view(*value.shape[:2], self.heads, -1)[:, :, numbers] = 0
                logits = self.wrapped.output.logits[:, -1].save()
            found.append(_target_logprob(logits, target))
        return np.concatenate(found)

    def _find(self, place: list[str]) -> Any:
        found = self.wrapped
        for part in place:
            found = found[int(part)] if part.isdigit() else getattr(found, part)
        return found


def by_layer(heads: Iterable[Head]) -> dict[int, list[int]]:
    """Layer -> head numbers, in order."""
    found: dict[int, list[int]] = {}
    for layer, head in sorted(heads):
        found.setdefault(layer, []).append(head)
    return found


@contextmanager
def _any_tokenizer(size: int) -> Iterator[Any]:
    """A word for every id. TransformerLens wants a tokenizer, though it is given ids, and reads it again from its
    folder."""
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(number): number for number in range(size)}, unk_token="0"))
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "0")
    with tempfile.TemporaryDirectory() as folder:
        PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
        yield AutoTokenizer.from_pretrained(folder)
