"""What is read from a model, and how its heads are ablated: the only room that runs models.

One forward pass a micro-batch gives, for every head, the attention row of the query position (T numbers a head, never
T x T), the Gram sum of the head's outputs there, and for every probe row how well the target token is predicted. What
is kept are sums over rows: memory does not grow with N, and sums over micro-batches and ranks are exact.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from spectral_monitor.anatomy import Anatomy, AttentionBlock, Kind, find_heads, interface_calls, torch_calls
from spectral_monitor.errors import CaptureError, ProbeError
from spectral_monitor.guest import guest, unwrap
from spectral_monitor.heads import Head
from spectral_monitor.observation import FloatArray, IntArray
from spectral_monitor.prefix import Extent, Prefix, PrefixMemory, holds_everywhere
from spectral_monitor.probe import ProbeBatch
from spectral_monitor.ranks import Reduction, split_over
from spectral_monitor.screen import Columns, column_indicators
from spectral_monitor.shortcut import (
    parts_behind_attention,
    query_row_only,
    same_bits,
    same_but_for_rounding,
    saves_work,
)
from spectral_monitor.spectrum import gram

#: ``(model, tokens [B, T], mask or None) -> logits`` of shape [B, T, V], [B, K, V] or [B, V]; see ``SpectralMonitor``.
Forward = Callable[[nn.Module, Tensor, "Tensor | None"], Any]


def default_batch_size(device: torch.device, length: int) -> int:
    """Rows a micro-batch, from 1 up: 2,048 tokens on a CPU, 16,384 elsewhere.

    On a CPU larger ones leave its caches (docs/benchmarks.md); an accelerator needs more to be busy.
    """
    return max(1, (2048 if device.type == "cpu" else 16384) // length)


# -- one attention row ------------------------------------------------------------------------------------------------


def attention_row(
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    *,
    mask: Any = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    window: int | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The query position's row of the attention matrix, softmax in float32 (recipe section 3).

    Args:
        query: [B, H, T, d]; key: [B, Hkv, S, d], with H a multiple of Hkv (grouped heads are expanded).
        positions: [B] query position of each row.
        mask: additive or boolean [B or 1, H or 1, T, >= S], a flex-attention BlockMask, a padding mask [B, S], None.
        scaling: of the scores; default ``d ** -0.5``. softcap: ``tanh(scores / softcap) * softcap``.
        sinks: [H] or [B, H, T, 1] logits of a sink outside the sequence. bias: [B or 1, H, T, S] added to the scores.
        window: sliding window, where the mask does not carry it. causal: nothing behind the position, likewise.

    Returns:
        [B, H, S] attention; [B, H] mass on the sink; [B, 1 or H, S] positions that the head can reach at all.
    """
    batch, heads, _, size = query.shape
    index = torch.arange(batch, device=query.device)
    row = query[index, :, positions].to(torch.float32)
    kv_heads, length = key.shape[1], key.shape[2]
    grouped = row.view(batch, kv_heads, heads // kv_heads, size)
    scores = torch.matmul(grouped, key.to(torch.float32).transpose(-1, -2)).view(batch, heads, length)
    scores = scores * (size**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + _mask_row(bias, positions, length).to(torch.float32)

    place = torch.arange(length, device=query.device)
    allowed = torch.ones(batch, 1, length, dtype=torch.bool, device=query.device)
    if isinstance(mask, Tensor) and mask.dim() == 4:
        given = _mask_row(mask, positions, length)
        if given.dtype == torch.bool:
            allowed = given
        else:
            allowed = given > torch.finfo(given.dtype).min / 2
            scores = scores + torch.where(allowed, given, 0).to(torch.float32)
    else:
        if isinstance(mask, Tensor):
            allowed = allowed & mask[:, None, :length].to(torch.bool)
        elif mask is not None:
            allowed = _block_mask_row(mask, positions, heads, length)
        if causal:
            allowed = allowed & (place <= positions[:, None])[:, None]
        if window is not None:
            allowed = allowed & (positions[:, None] - place < window)[:, None]
    scores = scores.masked_fill(~allowed, -torch.inf)
    if sinks is None:
        row = torch.softmax(scores, dim=-1)
        return row, torch.zeros_like(row[..., 0]), allowed
    sinks = sinks[index, :, positions] if sinks.dim() == 4 else sinks.reshape(1, heads, 1)
    column = sinks.to(torch.float32).expand(batch, heads, 1)
    row = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)
    return row[..., :-1], row[..., -1], allowed


def _mask_row(mask: Tensor, positions: Tensor, length: int) -> Tensor:
    """[B or 1, H or 1, T, S] -> the rows at ``positions`` [B, H or 1, S]."""
    batch = len(positions)
    if mask.shape[2] == 1:
        return mask[:, :, 0, :length].expand(batch, -1, -1)
    index = torch.arange(batch, device=mask.device) if mask.shape[0] > 1 else torch.zeros_like(positions)
    return mask[index, :, positions][..., :length]


def _block_mask_row(mask: Any, positions: Tensor, heads: int, length: int) -> Tensor:
    """The rows of a flex-attention BlockMask, from its own mask function."""
    batch = torch.arange(len(positions), device=positions.device)[:, None, None]
    head = torch.zeros(1, 1, 1, dtype=torch.long, device=positions.device)
    place = torch.arange(length, device=positions.device)[None, None, :]
    allowed: Tensor = mask.mask_mod(batch, head, positions[:, None, None], place)
    return allowed.expand(len(positions), 1, length)


#: Tensor keywords of attention functions that leave the scores as they are.
_HARMLESS = {"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "position_embeddings"}


def _interface_row(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], positions: Tensor) -> _Row:
    names = ("query", "key", "value", "attention_mask")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    extra = [
        name
        for name, value in given.items()
        if isinstance(value, Tensor) and value.is_floating_point() and name not in (*names, *_KNOWN, *_HARMLESS)
    ]
    if extra:
        raise CaptureError(
            f"{type(module).__name__} passes {extra[0]!r} to its attention function, which is not known here: "
            "its attention row would be wrong, so the model is not measured"
        )
    causal = given.get("is_causal")
    return attention_row(
        given["query"],
        given["key"],
        positions,
        mask=given.get("attention_mask"),
        scaling=given.get("scaling"),
        softcap=given.get("softcap"),
        sinks=given["sinks"] if given.get("s_aux") is None and "sinks" in given else given.get("s_aux"),
        bias=given.get("position_bias"),
        window=given.get("sliding_window"),
        causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
    )


_KNOWN = ("s_aux", "sinks", "position_bias", "scaling", "softcap", "dropout")
_Row = tuple[Tensor, Tensor, Tensor]


def _sdpa_row(args: tuple[Any, ...], kwargs: dict[str, Any], positions: Tensor) -> _Row:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mask = given.get("attn_mask")
    while isinstance(mask, Tensor) and mask.dim() < 4:
        mask = mask[None]
    return attention_row(
        given["query"],
        given["key"],
        positions,
        mask=mask,
        scaling=given.get("scale"),
        causal=bool(given.get("is_causal", False)),
    )


def _heads_of(scores: Tensor, batch: int, length: int) -> int:
    """Number of heads of a score matrix [B, H, T, T] or [B * H, T, T] over ``length`` positions; 0 for others."""
    if scores.shape[-1] != length or scores.shape[-2] != length:
        return 0
    if scores.dim() == 4:
        return scores.shape[1] if scores.shape[0] == batch else 0
    return scores.shape[0] // batch if scores.dim() == 3 and scores.shape[0] % batch == 0 else 0


def _softmax_row(scores: Tensor, positions: Tensor) -> _Row:
    batch = len(positions)
    scores = scores.view(batch, -1, *scores.shape[-2:])
    row = _mask_row(scores, positions, scores.shape[-1]).to(torch.float32)
    lowest = torch.finfo(scores.dtype).min / 2
    # Models mask with very low finite scores as often as with -inf; both get no mass and count as out of reach.
    allowed = row > max(lowest, -1e4 if scores.dtype == torch.float16 else -1e8)
    return torch.softmax(row, dim=-1), torch.zeros_like(row[..., 0]), allowed


# -- running a model --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ablation:
    """A named set of heads to take out; the empty set is the baseline."""

    name: str
    heads: frozenset[Head] = frozenset()


@dataclass
class Examples:
    """Per-row results of the probe's task under one condition; all [N].

    ``logprob`` of the target (nats, float64), its ``logit``, its ``rank`` among all tokens (0 = top; -1 where the
    logits are not finite), and ``advantage``: target log-probability minus the mean log-probability of the other
    tokens of the row (how much better than "some token of this context" the model does).
    """

    logprob: FloatArray
    logit: FloatArray
    rank: IntArray
    advantage: FloatArray

    @classmethod
    def empty(cls, rows: int) -> Examples:
        """Nothing measured yet: zeros."""
        return cls(np.zeros(rows), np.zeros(rows), np.zeros(rows, dtype=np.int64), np.zeros(rows))

    def top(self, k: int) -> FloatArray:
        """[N] 1.0 where the target is among the k most likely tokens."""
        hit: FloatArray = ((self.rank >= 0) & (self.rank < k)).astype(np.float64)
        return hit


@dataclass
class BlockSums:
    """Sums over probe rows for one attention block (H heads, C screen columns)."""

    gram: Tensor
    columns: Tensor
    counts: Tensor
    mass: Tensor
    sink: Tensor
    null: Tensor
    null_counts: Tensor
    gram_null: Tensor | None = None
    content: Tensor | None = None
    spread: Tensor | None = None
    mean: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """All sums, in a fixed order (for a reduction over ranks)."""
        values = (getattr(self, name) for name in self.__dataclass_fields__)
        return [value for value in values if value is not None]

    def replace(self, tensors: Sequence[Tensor]) -> None:
        """Put other values in the place of ``tensors()``."""
        names = [name for name in self.__dataclass_fields__ if getattr(self, name) is not None]
        for name, tensor in zip(names, tensors, strict=True):
            setattr(self, name, tensor)


@dataclass
class Reading:
    """What one pass over a probe batch gave, before it becomes an ``Observation``.

    ``blocks`` are in the order of ``anatomy.blocks``; ``columns`` names their C columns.
    """

    anatomy: Anatomy
    columns: Columns
    rows: int
    blocks: list[BlockSums]
    examples: Examples


class Subject:
    """A model made ready to be read: its anatomy, and how it is called.

    Args:
        model: any causal language model; wrappers of ``torch.compile`` and DDP are looked through.
        probe: used for the discovery pass (its first two rows).
        forward: how to call a model that does not follow transformers' conventions, ``forward(model, tokens, mask)``
            returning logits for all positions, or for the last one where every query is last.
        reduce: how ranks share the work; a layer's heads may lie on several of them.

    Raises:
        CaptureError: the model's heads cannot be read (the message says what is missing).
        ProbeError: the probe does not fit the model (length, vocabulary).
    """

    def __init__(
        self,
        model: nn.Module,
        probe: ProbeBatch,
        forward: Forward | None = None,
        reduce: Reduction | None = None,
    ) -> None:
        self.model = unwrap(model)
        self._forward = forward
        self._accepts = _parameters_of(self.model) if forward is None else frozenset()
        check_fit(self.model, probe)
        check_whole(self.model)
        own = self._discover(probe)
        #: Which heads of each block this rank holds; ``anatomy`` has them all.
        self.own_heads = [_own_heads(block, reduce or Reduction()) for block in own.blocks]
        whole = (replace(b, heads=total) for b, (_, total) in zip(own.blocks, self.own_heads, strict=True))
        self.anatomy = replace(own, blocks=tuple(whole))
        self._attention_of = {(id(b.module), b.call): n for n, b in enumerate(self.anatomy.blocks)}
        self._projection_of = {(id(b.projection), b.projection_call): n for n, b in enumerate(self.anatomy.blocks)}
        #: What ``_ConditionRun.settle`` found out: the prefix's extent, and whether conditions may share a forward.
        self._replay: dict[tuple[int, int, bool], tuple[Extent, bool]] = {}
        self._check_itself(probe)

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        embeddings = getattr(self.model, "get_input_embeddings", None)
        weights = list(embeddings().parameters()) if embeddings is not None and embeddings() is not None else []
        weights = weights or list(self.model.parameters())
        mesh = getattr(weights[0], "device_mesh", None) if weights else None
        if mesh is not None:  # a sharded weight may rest on the CPU and compute elsewhere
            return torch.empty(0, device=mesh.device_type).device
        return weights[0].device if weights else torch.device("cpu")

    def logits(self, tokens: Tensor, query: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, V] logits at the query positions: one forward pass, no cache, the last logit only where possible."""
        batch, length = tokens.shape
        positions = torch.unique(query)
        if self._forward is not None:
            output = self._forward(self.model, tokens, mask)
        else:
            options: dict[str, Any] = {}
            if mask is not None:
                options["attention_mask"] = mask
            if "use_cache" in self._accepts:
                options["use_cache"] = False
            if "logits_to_keep" in self._accepts:
                last = len(positions) == 1 and int(positions) == length - 1
                options["logits_to_keep"] = 1 if last else positions
            output = self.model(tokens, **options)
        logits = _logits_of(output, self.model)
        if logits.dim() == 2:
            return logits
        index = torch.arange(batch, device=logits.device)
        if logits.shape[1] == length:
            return logits[index, query.to(logits.device)]
        if logits.shape[1] == len(positions):
            return logits[index, torch.searchsorted(positions, query).to(logits.device)]
        raise CaptureError(
            f"{type(self.model).__name__} returned logits of shape {tuple(logits.shape)} for tokens "
            f"{tuple(tokens.shape)}: expected one row a position, or the query positions only"
        )

    def _discover(self, probe: ProbeBatch) -> Anatomy:
        few = probe.take(slice(0, 2))
        tokens, query, mask = self._inputs(few, np.arange(few.rows))
        # One token less than the probe: a softmax over 256 experts is not to be taken for one over 256 positions.
        short = tokens[:, :-1], query.clamp_max(probe.length - 2), None if mask is None else mask[:, :-1]
        with guest(self.model):
            try:
                return find_heads(self.model, lambda: self.logits(*short), *short[0].shape)
            except (CaptureError, torch.OutOfMemoryError):
                raise
            except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
                raise CaptureError(
                    f"{type(self.model).__name__} could not be run on rows of token ids ({_first_line(error)}): causal "
                    "language models that need nothing else are read; for another calling convention pass forward="
                ) from error

    def _check_itself(self, probe: ProbeBatch) -> None:
        """Hold what is read against what the model computes, on two rows (see ``_CheckTap``)."""
        few = probe.take(slice(0, 2))
        rows = np.arange(few.rows)
        tokens, query, mask = self._inputs(few, rows)
        with guest(self.model):
            plain = self.logits(tokens, query, mask)
        seen = self.watched_logits(few)
        if not torch.equal(plain.nan_to_num(), seen.nan_to_num()):
            raise CaptureError(
                f"{type(self.model).__name__}: logits change when its attention is watched (by up to "
                f"{(plain - seen).abs().max().item():.2g}): it is not deterministic, or it cannot be read safely"
            )
        parts = parts_behind_attention(self.anatomy)
        with guest(self.model):
            safe = saves_work(parts, query, plain, lambda: self.logits(tokens, query, mask))
        self._behind_attention = parts if safe else ()

    def watched_logits(self, probe: ProbeBatch) -> Tensor:
        """[N, V] logits at the queries, all rows at once, while every attention is read and checked.

        Raises:
            CaptureError: something that must hold for causal attention does not (see ``_CheckTap``).
        """
        tap = _CheckTap(self)
        with self._instrumented(tap):
            return self._run(tap, probe, np.arange(probe.rows))

    def _inputs(self, probe: ProbeBatch, rows: IntArray, companion: str | None = None) -> Any:
        tokens = probe.tokens if companion is None else probe.companions[companion]
        device = self.device
        mask = None if probe.mask is None else torch.from_numpy(probe.mask[rows].astype(np.int64)).to(device)
        return torch.from_numpy(tokens[rows]).to(device), torch.from_numpy(probe.query[rows]).to(device), mask

    # -- instrumentation --------------------------------------------------------------------------------------------

    @contextmanager
    def _instrumented(self, tap: _Tap) -> Iterator[None]:
        kinds = {block.kind for block in self.anatomy.blocks}
        with ExitStack() as stack:
            stack.enter_context(guest(self.model))
            for projection in {id(b.projection): b.projection for b in self.anatomy.blocks}.values():
                # prepend: ahead of tensor parallelism's own input hooks, on the plain local tensor
                hook = projection.register_forward_pre_hook(tap.at_projection, prepend=True, with_kwargs=True)
                stack.callback(hook.remove)
            for module in {id(b.module): b.module for b in self.anatomy.blocks}.values():
                stack.callback(module.register_forward_pre_hook(tap.entering).remove)
                stack.callback(module.register_forward_hook(tap.leaving, always_call=True).remove)
            if tap.reads_attention and "interface" in kinds:
                stack.enter_context(interface_calls(tap.on_interface))
            if tap.reads_attention and kinds & {"sdpa", "softmax"}:
                stack.enter_context(torch_calls(tap.on_torch))
            yield

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(
        self,
        probe: ProbeBatch,
        batch_size: int = 16,
        null_draws: int = 0,
        companions: Sequence[str] = (),
        reduce: Reduction | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Reading:
        """One pass over the probe batch.

        Args:
            batch_size: rows a micro-batch.
            null_draws: random targets a head for the null calibration.
            companions: which of ``probe.companions`` to run too (one more forward pass each).
            reduce: how to share rows with other ranks and add up their sums; None: one process.
            progress: called with the number of rows done.
        """
        reduce = reduce or Reduction()
        columns = Columns.of(probe)
        null_positions = probe.null_positions(null_draws) if null_draws else None
        tap = _ReadTap(self, probe, columns, null_draws)
        examples = Examples.empty(probe.rows)
        short = query_row_only(self._behind_attention, lambda: tap.query)
        with reduce.together(), self._instrumented(tap), short:
            for rows, counts in reduce.micro_batches(probe.rows, batch_size):
                tap.begin(rows, None if null_positions is None else null_positions[rows], counts)
                logits = self._run(tap, probe, rows)
                if counts:
                    self._score(examples, probe, rows, logits)
                for companion in companions:
                    tap.companion(companion)
                    self._run(tap, probe, rows, companion)
                if progress is not None:
                    progress(len(rows))
        tap.fill(companions)
        reduce.sum([tensor for block in tap.sums for tensor in block.tensors()])
        self._join_heads(tap.sums, reduce)
        reduce.sum_arrays([examples.logprob, examples.logit, examples.rank, examples.advantage])
        return Reading(self.anatomy, columns, probe.rows, tap.sums, examples)

    def _join_heads(self, sums: list[BlockSums], reduce: Reduction) -> None:
        for number, (own, total) in enumerate(self.own_heads):
            if len(own) < total:
                sums[number].replace(reduce.join_heads(sums[number].tensors()))

    def _run(self, tap: _Tap, probe: ProbeBatch, rows: IntArray, companion: str | None = None) -> Tensor:
        tokens, query, mask = self._inputs(probe, rows, companion)
        tap.new_forward(query, tokens.shape[1])
        logits = self.logits(tokens, query, mask)
        tap.check_complete()
        return logits

    def _score(self, examples: Examples, probe: ProbeBatch, rows: IntArray, logits: Tensor) -> None:
        device = logits.device
        target = torch.from_numpy(probe.target[rows]).to(device)
        logits = logits.to(torch.float32)
        logprobs = torch.log_softmax(logits, dim=-1)
        own = logits.gather(-1, target[:, None])
        rank = (logits > own).sum(-1)
        earlier = torch.arange(logits.shape[-1], device=device)[None] < target[:, None]
        rank = rank + ((logits == own) & earlier).sum(-1)
        finite = torch.isfinite(own[:, 0]) & ~torch.isnan(logits).any(-1)
        others = torch.from_numpy(probe.tokens[rows]).to(device)
        real = torch.from_numpy(probe.free_positions(rows)).to(device) & (others != target[:, None])
        context = (logprobs.gather(-1, others) * real).sum(-1) / real.sum(-1).clamp_min(1)
        logprob = logprobs.gather(-1, target[:, None])[:, 0]
        examples.logprob[rows] = logprob.double().cpu().numpy()
        examples.logit[rows] = own[:, 0].double().cpu().numpy()
        examples.rank[rows] = torch.where(finite, rank, -1).cpu().numpy()
        examples.advantage[rows] = (logprob - context).double().cpu().numpy()

    # -- ablation ---------------------------------------------------------------------------------------------------

    def mean_outputs(
        self, probe: ProbeBatch, layers: Sequence[int], batch_size: int = 16, reduce: Reduction | None = None
    ) -> dict[int, Tensor]:
        """Layer -> [T, H, D] mean of each head's output over all probe rows, position by position (float64).

        From the intact model; biases of the projection are not touched by it.
        """
        if probe.rows < 2:
            raise ProbeError("mean ablation needs at least two probe rows: with one row it changes nothing")
        reduce = reduce or Reduction()
        tap = _MeanTap(self, {self._number_of(layer) for layer in layers})
        with reduce.together(), self._instrumented(tap):
            for rows, counts in reduce.micro_batches(probe.rows, batch_size):
                tap.counts = counts
                self._run(tap, probe, rows)
        reduce.sum([tap.sums[number] for number in sorted(tap.sums)])
        return {self.anatomy.blocks[number].layer: total / probe.rows for number, total in tap.sums.items()}

    def run_conditions(
        self,
        probe: ProbeBatch,
        conditions: Sequence[Ablation],
        batch_size: int = 16,
        means: Mapping[int, Tensor] | None = None,
        reduce: Reduction | None = None,
        progress: Callable[[int], None] | None = None,
        memory: PrefixMemory | None = None,
    ) -> list[Examples]:
        """The probe's task under each ablation (recipe section 4).

        Zero ablation, or mean ablation where ``means`` (from ``mean_outputs``) are given. What all conditions share,
        the model in front of the first ablated output projection, runs once a micro-batch (see ``Prefix``); behind the
        last attention the query's row alone is computed where that is safe (see ``shortcut``); and where the probe
        has fewer rows than ``batch_size``, several conditions share a forward. ``memory`` carries the shared part from
        one call to the next, with the same probe, ``batch_size`` and model.
        """
        reduce = reduce or Reduction()
        for condition in conditions:
            self._check_heads(condition.heads)
        results = [Examples.empty(probe.rows) for _ in conditions]
        run = _ConditionRun(self, probe, conditions, means, memory or PrefixMemory(limit=0))
        together = max(1, batch_size // probe.rows)
        micro_batches = list(reduce.micro_batches(probe.rows, batch_size))
        together = run.settle(micro_batches[0][0], together, reduce)
        with reduce.together(), run.instrumented():
            for number, (rows, counts) in enumerate(micro_batches):
                for place, logits in run.each(rows, number, together):
                    if counts:
                        self._score(results[place], probe, rows, logits)
                    if progress is not None:
                        progress(len(rows))
        for result in results:
            reduce.sum_arrays([result.logprob, result.logit, result.rank, result.advantage])
        return results

    def _number_of(self, layer: int) -> int:
        return self.anatomy.blocks.index(self.anatomy.block(layer))

    def _check_heads(self, heads: frozenset[Head]) -> None:
        for layer, head in heads:
            block = self.anatomy.block(layer)
            if not 0 <= head < block.heads:
                raise CaptureError(f"layer {layer} has heads 0..{block.heads - 1}, there is no {Head(layer, head)}")


# -- taps: what happens at the places that are watched ------------------------------------------------------------


class _Tap:
    """Counts calls within a forward and hands each to the right attention block."""

    reads_attention = False

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._blocks = subject.anatomy.blocks
        self._calls: dict[int, int] = {}
        self._projection_calls: dict[int, int] = {}
        self._open: list[int] = []
        self._seen: set[int] = set()
        self._rows_seen: set[int] = set()
        self.skipped: frozenset[int] = frozenset()
        self.query: Tensor = torch.zeros(0, dtype=torch.long)
        self.length = 0

    def new_forward(self, query: Tensor, length: int) -> None:
        self._calls, self._projection_calls, self._open = {}, {}, []
        self._seen, self._rows_seen = set(), set()
        self.query, self.length = query, length

    def check_complete(self) -> None:
        seen = self._seen & self._rows_seen if self.reads_attention else self._seen
        missing = [b for n, b in enumerate(self._blocks) if n not in seen and n not in self.skipped]
        if missing:
            raise CaptureError(
                f"{len(missing)} of {len(self._blocks)} attention layers gave nothing in this pass (first: layer "
                f"{missing[0].layer}, {missing[0].name}): the model took another path than when it was examined"
            )

    def entering(self, module: nn.Module, args: Any) -> None:
        self._calls[id(module)] = self._calls.get(id(module), 0) + 1
        number = self._subject._attention_of.get((id(module), self._calls[id(module)]))
        if number is not None:
            self._open.append(number)

    def leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._open and self._blocks[self._open[-1]].module is module:
            self._open.pop()

    def at_projection(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._projection_calls[id(module)] = self._projection_calls.get(id(module), 0) + 1
        number = self._subject._projection_of.get((id(module), self._projection_calls[id(module)]))
        if number is None:
            return None
        self._seen.add(number)
        block = self._blocks[number]
        value = args[0] if args else next(iter(kwargs.values()))
        outputs = value.view(*value.shape[:-1], -1, block.head_dim)
        if outputs.dim() == 3:  # rows and positions flattened into one
            outputs = outputs.view(len(self.query), -1, *outputs.shape[-2:])
        changed = self.heads_ran(number, outputs)
        if changed is None:
            return None
        changed = changed.reshape(value.shape)
        if args:
            return (changed, *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): changed}

    def on_interface(self, module: nn.Module, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = self._current(module)
        if number is None or self._blocks[number].kind != "interface":
            return original(module, *args, **kwargs)
        row = _interface_row(module, args, kwargs, self.query)
        result = original(module, *args, **kwargs)
        output = result[0] if isinstance(result, tuple) else result
        self._row_read(number, row, args[2] if len(args) > 2 else kwargs["value"], output)
        return result

    def on_torch(self, kind: Kind, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = original(*args, **kwargs)
        number = self._open[-1] if self._open else None
        if number is None or self._blocks[number].kind != kind:
            return result
        if kind == "sdpa":
            value = args[2] if len(args) > 2 else kwargs["value"]
            self._row_read(number, _sdpa_row(args, kwargs, self.query), value, result.transpose(1, 2))
            return result
        scores = args[0] if args else kwargs["input"]
        if _heads_of(scores, len(self.query), self.length) == self._blocks[number].heads:
            self._row_read(number, _softmax_row(scores, self.query))
        return result

    def _row_read(self, number: int, row: _Row, value: Tensor | None = None, output: Tensor | None = None) -> None:
        self._rows_seen.add(number)
        self.attention_ran(number, row)
        if value is not None and output is not None:
            self.attention_gave(number, row, value, output)

    def _current(self, module: nn.Module) -> int | None:
        return self._subject._attention_of.get((id(module), self._calls.get(id(module), 1)))

    def heads_ran(self, number: int, outputs: Tensor) -> Tensor | None:
        """Outputs [B, T, H, D] of a block's heads; return what to put in their place, or None."""
        return None

    def attention_ran(self, number: int, row: _Row) -> None:
        """A block's attention row, sink mass and reach (see ``attention_row``)."""

    def attention_gave(self, number: int, row: _Row, value: Tensor, output: Tensor) -> None:
        """Values [B, Hkv, T, D] and outputs [B, T, H, D] of the same attention call, where they can be seen."""


class _CheckTap(_Tap):
    """Refuses what would be measured wrong, by what must hold for every causal attention.

    In one row of the probe at its query, in the other in the middle of the row: attention and sink add up to 1; none
    lies behind the position; attention times values is what the attention function itself returned; and no layer's
    outputs are all exactly zero.
    """

    reads_attention = True

    def new_forward(self, query: Tensor, length: int) -> None:
        query = query.clone()
        query[-1] = length // 2
        super().new_forward(query, length)

    def attention_ran(self, number: int, row: _Row) -> None:
        attention, sink, _ = row
        if not torch.isfinite(attention).all():
            return  # an overflow in half precision: marked in the observation, not a fault of the reading
        total = attention.sum(-1) + sink
        if (total - 1).abs().max() > 1e-3:
            raise self._refusal(number, f"attention and sink add up to {_farthest(total):.4g} instead of 1")
        place = torch.arange(attention.shape[-1], device=attention.device)
        behind = place > self.query.to(attention.device)[:, None]
        ahead = (attention * behind[:, None]).sum(-1).max()
        if ahead > 1e-6:
            raise self._refusal(
                number,
                f"{ahead.item():.2g} of a head's attention lies on tokens behind the position: the model is not causal "
                "(an encoder needs is_decoder=True in its config)",
            )

    def attention_gave(self, number: int, row: _Row, value: Tensor, output: Tensor) -> None:
        attention = row[0]
        heads = attention.shape[1]
        expanded = value.to(torch.float32).repeat_interleave(heads // value.shape[1], dim=1)
        expected = torch.matmul(attention[:, :, None], expanded)[:, :, 0]
        index = torch.arange(len(attention), device=output.device)
        given = output[index, self.query.to(output.device)].to(torch.float32)
        if not (torch.isfinite(expected).all() and torch.isfinite(given).all()):
            return
        difference = (expected - given).abs().max()
        exact = output.dtype in (torch.float32, torch.float64)
        if difference > (1e-4 if exact else 5e-2) * given.abs().max().clamp_min(1e-6):
            raise self._refusal(
                number,
                f"its attention rows times its values differ from what its own attention function gives by "
                f"{difference.item():.2g}: the scores hold something that is not known here",
            )

    def heads_ran(self, number: int, outputs: Tensor) -> None:
        if not outputs.any():
            raise self._refusal(number, "the outputs of all its heads are exactly zero: there is nothing to measure")

    def _refusal(self, number: int, reason: str) -> CaptureError:
        block = self._blocks[number]
        name = type(self._subject.model).__name__
        return CaptureError(f"{name}, layer {block.layer} ({block.name}): {reason}; the model is not measured")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _farthest(total: Tensor) -> float:
    return float(total.flatten()[(total - 1).abs().argmax()])


class _ReadTap(_Tap):
    reads_attention = True

    def __init__(self, subject: Subject, probe: ProbeBatch, columns: Columns, null_draws: int) -> None:
        super().__init__(subject)
        self._probe, self._columns, self._null_draws = probe, columns, null_draws
        self.sums: list[BlockSums] = [cast(BlockSums, None)] * len(self._blocks)
        self._companion: str | None = None
        self._counts = True
        self._indicators = torch.zeros(0)
        self._usable = torch.zeros(0)
        self._null: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def begin(self, rows: IntArray, null_positions: IntArray | None, counts: bool) -> None:
        indicators, usable = column_indicators(self._probe, rows)
        device = self._subject.device
        self._indicators = torch.from_numpy(indicators).to(device, torch.float64)
        self._usable = torch.from_numpy(usable).to(device)
        self._null = None if null_positions is None else torch.from_numpy(null_positions).to(device)
        self._counts, self._companion = counts, None
        self._outputs = {}

    def companion(self, name: str) -> None:
        self._companion = name

    def _block_sums(self, number: int, like: Tensor) -> BlockSums:
        if self.sums[number] is None:
            block = self._blocks[number]
            heads, size, columns = len(self._subject.own_heads[number][0]), block.head_dim, len(self._columns.names)

            def zeros(*shape: int) -> Tensor:
                return torch.zeros(*shape, dtype=torch.float64, device=like.device)

            self.sums[number] = BlockSums(
                gram=zeros(heads, size, size),
                columns=zeros(heads, columns),
                counts=zeros(heads, columns),
                mass=zeros(heads),
                sink=zeros(heads),
                null=zeros(heads, self._null_draws),
                null_counts=zeros(heads, self._null_draws),
            )
        return self.sums[number]

    def fill(self, companions: Sequence[str]) -> None:
        """A rank that had no row of its own adds zeros to every sum that the others have."""
        for number, own in enumerate(self.sums):
            if own is None:
                sums = self._block_sums(number, torch.zeros(0, device=self._subject.device))
                if "null" in companions:
                    sums.gram_null = torch.zeros_like(sums.gram)
                if "content" in companions:
                    sums.content, sums.spread = torch.zeros_like(sums.mass), torch.zeros_like(sums.mass)
                    sums.mean = torch.zeros_like(sums.gram[:, 0])

    def attention_ran(self, number: int, row: _Row) -> None:
        if self._companion is not None or not self._counts:
            return
        attention, sink, allowed = row
        sums = self._block_sums(number, attention)
        attention = attention.to(torch.float64)
        indicators, usable = (t.to(attention.device) for t in (self._indicators, self._usable))
        length = attention.shape[-1]
        indicators = indicators[:, :length]
        mass = torch.matmul(attention, indicators)
        reachable = torch.matmul(allowed.to(torch.float64), indicators)
        counts = usable[:, None] * (reachable > 0)
        sums.columns += (counts * mass / reachable.clamp_min(1)).sum(0)
        sums.counts += counts.sum(0)
        sums.mass += attention.sum(-1).sum(0)
        sums.sink += sink.to(torch.float64).sum(0)
        if self._null is not None:
            positions = self._null.to(attention.device)[:, None]
            valid = (positions >= 0) & allowed.gather(-1, positions.clamp_min(0).expand(-1, allowed.shape[1], -1))
            value = attention.gather(-1, positions.clamp_min(0).expand(-1, attention.shape[1], -1))
            sums.null += (value * valid).sum(0)
            sums.null_counts += valid.to(torch.float64).sum(0)

    def heads_ran(self, number: int, outputs: Tensor) -> None:
        if not self._counts:
            return
        index = torch.arange(len(outputs), device=outputs.device)
        rows = outputs[index, self.query.to(outputs.device)]
        sums = self._block_sums(number, rows)
        if self._companion is None:
            sums.gram += gram(rows)
            self._outputs[number] = rows.to(torch.float64)
        elif self._companion == "null":
            own = gram(rows)
            sums.gram_null = own if sums.gram_null is None else sums.gram_null + own
        elif self._companion == "content":
            before = self._outputs[number]
            change = (before - rows.to(torch.float64)).square().sum((0, -1))
            mean, spread = before.sum(0), before.square().sum((0, -1))
            sums.content = change if sums.content is None else sums.content + change
            sums.mean = mean if sums.mean is None else sums.mean + mean
            sums.spread = spread if sums.spread is None else sums.spread + spread
        return None


class _MeanTap(_Tap):
    def __init__(self, subject: Subject, numbers: set[int]) -> None:
        super().__init__(subject)
        self.counts = True
        self._numbers = numbers
        self.sums: dict[int, Tensor] = {}

    def heads_ran(self, number: int, outputs: Tensor) -> None:
        if number not in self._numbers:
            return None
        if number not in self.sums:
            self.sums[number] = torch.zeros(outputs.shape[1:], dtype=torch.float64, device=outputs.device)
        if self.counts:
            self.sums[number] += outputs.to(torch.float64).sum(0)
        return None


class _AblationTap(_Tap):
    def __init__(self, subject: Subject, means: Mapping[int, Tensor] | None) -> None:
        super().__init__(subject)
        self._means = means
        self._conditions = 1
        self._out: dict[int, dict[int, list[int]]] = {}

    def set(self, conditions: Sequence[frozenset[Head]]) -> None:
        """From now on, ablate the heads of each condition in its equal share of the rows.

        As far as this rank holds them: numbers in ``_out`` (layer -> condition -> heads) are its own.
        """
        self._conditions = len(conditions)
        self._out = {}
        for number, heads in enumerate(conditions):
            for layer, head in sorted(heads):
                own, _ = self._subject.own_heads[self._subject._number_of(layer)]
                if head in own:
                    self._out.setdefault(layer, {}).setdefault(number, []).append(own.index(head))

    def heads_ran(self, number: int, outputs: Tensor) -> Tensor | None:
        layer = self._blocks[number].layer
        if layer not in self._out:
            return None
        changed = outputs.clone()
        shares = changed.split(len(changed) // self._conditions)
        for condition, heads in self._out[layer].items():
            if self._means is None:
                shares[condition][:, :, heads] = 0
            else:
                mean = self._means[layer][: outputs.shape[1]].to(outputs.device, outputs.dtype)
                shares[condition][:, :, heads] = mean[:, heads]
        return changed


class _ConditionRun:
    """The conditions of one call of ``Subject.run_conditions``, micro-batch by micro-batch."""

    def __init__(
        self,
        subject: Subject,
        probe: ProbeBatch,
        conditions: Sequence[Ablation],
        means: Mapping[int, Tensor] | None,
        memory: PrefixMemory,
    ) -> None:
        self._subject, self._probe, self._memory = subject, probe, memory
        self._heads = [condition.heads for condition in conditions]
        self._tap = _AblationTap(subject, means)
        self._prefix = Prefix(subject.anatomy, [head.layer for heads in self._heads for head in heads])

    @contextmanager
    def instrumented(self) -> Iterator[None]:
        """Inside, forwards are ablated, and behind the last attention see the query's row alone where that is safe."""
        short = query_row_only(self._subject._behind_attention, lambda: self._tap.query)
        with self._subject._instrumented(self._tap), short:
            yield

    def each(self, rows: IntArray, number: int, together: int) -> Iterator[tuple[int, Tensor]]:
        """Place and [B, V] logits of every condition on micro-batch ``number``, ``together`` of them in a forward."""
        intact = self._intact(rows, number)
        yield from ((place, intact) for place, heads in enumerate(self._heads) if not heads)
        ablated = [place for place, heads in enumerate(self._heads) if heads]
        for start in range(0, len(ablated), together):
            group = ablated[start : start + together]
            logits = self._replayed(rows, [self._heads[place] for place in group])
            yield from zip(group, logits.split(len(rows)), strict=True)

    def settle(self, rows: IntArray, together: int, reduce: Reduction) -> int:
        """Find out on ``rows``, once for a layer and a length, how much may be replayed, and how many conditions may
        share a forward (returned: ``together`` or 1).

        Replayed and not, a condition must have the same logits to the bit; sharing a forward, the same up to what
        another matrix shape rounds differently.
        """
        heads = next((heads for heads in self._heads if heads), None)
        if heads is None:
            return 1
        key = (self._prefix.layer, self._probe.length, together > 1)
        known = self._subject._replay
        if key not in known:
            with reduce.together(), self.instrumented():
                self._record(rows)
                self._tap.set([heads])
                plain = self._subject._run(self._tap, self._probe, rows)

            def replayed(*conditions: frozenset[Head]) -> Tensor:
                with self.instrumented():
                    return self._replayed(rows, conditions)[-len(rows) :]

            self._prefix.settle(lambda: same_bits(replayed(heads), plain), reduce)
            shares = together > 1 and holds_everywhere(
                lambda: same_but_for_rounding(replayed(frozenset(), heads), plain), reduce
            )
            known[key] = self._prefix.extent, shares
        self._prefix.extent, shares = known[key]
        return together if shares else 1

    def _intact(self, rows: IntArray, number: int) -> Tensor:
        kept = self._memory.recall(self._prefix.layer, number)
        if kept is not None:
            self._prefix.recorded = kept
        else:
            self._record(rows)
            self._memory.keep(self._prefix.layer, number, self._prefix.recorded)
        logits = self._prefix.recorded.logits
        assert logits is not None
        return logits

    def _record(self, rows: IntArray) -> None:
        self._tap.set([frozenset()])
        with self._prefix.recording() as recorded:
            recorded.logits = self._subject._run(self._tap, self._probe, rows)

    def _replayed(self, rows: IntArray, conditions: Sequence[frozenset[Head]]) -> Tensor:
        """[conditions x B, V] logits of one forward over as many copies of ``rows``."""
        self._tap.set(conditions)
        with self._prefix.replaying(self._tap, len(rows), len(conditions)):
            return self._subject._run(self._tap, self._probe, np.tile(rows, len(conditions)))


def _own_heads(block: AttentionBlock, reduce: Reduction) -> tuple[range, int]:
    """The heads of a block that this rank holds, and how many there are on all ranks (tensor parallelism)."""
    if split_over(block.projection) is None:
        return range(block.heads), block.heads
    place, size = reduce.head_rank
    counts = [int(n) for n in torch.cat(reduce.join_heads([torch.tensor([block.heads])]))]
    if len(counts) != size or size == 1:
        raise CaptureError(
            f"layer {block.layer}: its output projection is split over ranks (tensor parallelism), but the monitor was "
            "made for a single process: leave out reduce=, or start it under torch.distributed"
        )
    first = sum(counts[:place])
    return range(first, first + block.heads), sum(counts)


# -- fitting probe and model ------------------------------------------------------------------------------------------


def vocabulary_of(model: nn.Module) -> int | None:
    """Number of token ids that the model's embedding has, or None when that is not known."""
    model = unwrap(model)
    sizes = []
    config = getattr(model, "config", None)
    for source in (config, getattr(config, "text_config", None)):
        size = getattr(source, "vocab_size", None)
        if isinstance(size, int):
            sizes.append(size)
    get = getattr(model, "get_input_embeddings", None)
    weight = getattr(get() if get is not None else None, "weight", None)
    if isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[0] > 0:
        sizes.append(int(weight.shape[0]))
    return min(sizes) if sizes else None


def longest_input(model: nn.Module) -> int | None:
    """Longest row that the model takes, or None when it states no limit."""
    config = getattr(unwrap(model), "config", None)
    config = getattr(config, "text_config", config)
    # The first name is transformers', the others are customary in models written by hand.
    limits = (getattr(config, name, None) for name in ("max_position_embeddings", "block_size", "max_seq_len"))
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


def check_fit(model: nn.Module, probe: ProbeBatch) -> None:
    """ProbeError when the probe's rows are too long for the model or hold ids that it does not have."""
    limit, vocabulary = longest_input(model), vocabulary_of(model)
    name = type(unwrap(model)).__name__
    if limit is not None and probe.length > limit:
        raise ProbeError(f"probe rows have {probe.length} tokens, {name} takes at most {limit}: use a shorter row")
    largest = int(max(probe.tokens.max(), *(tokens.max() for tokens in probe.companions.values()), probe.target.max()))
    if vocabulary is not None and largest >= vocabulary:
        raise ProbeError(f"the probe holds token id {largest}, {name} has ids 0..{vocabulary - 1}: build it with them")


def check_whole(model: nn.Module) -> None:
    """CaptureError for weights that are sharded in a way that was never tried: FSDP1 and DeepSpeed ZeRO-3.

    FSDP2 (``fully_shard``), tensor parallelism and DDP are fine. A silent zero is worse than a refusal.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise CaptureError("the model is sharded by FSDP1, which is not supported: use FSDP2 (fully_shard)")
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise CaptureError(
                "the model is sharded by DeepSpeed ZeRO-3, which is not supported: use ZeRO-2, FSDP2 or DDP"
            )
        if parameter.numel() == 0:
            raise CaptureError(
                f"parameter {name} holds no elements on this rank: the model is sharded in a way that cannot be read"
            )


def _parameters_of(model: nn.Module) -> frozenset[str]:
    """Names that the model's forward takes (looking through adapters such as PEFT's)."""
    base = getattr(model, "get_base_model", None)
    target = base() if callable(base) else model
    return frozenset(inspect.signature(target.forward).parameters)


def _logits_of(output: Any, model: nn.Module) -> Tensor:
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None and isinstance(output, (tuple, list)):
        logits = output[0]
    if not isinstance(logits, Tensor) or logits.dim() not in (2, 3):
        raise CaptureError(
            f"{type(model).__name__} returned no logits (got {type(output).__name__}): a language-model head is "
            "needed; for a model with its own calling convention pass forward="
        )
    return logits
