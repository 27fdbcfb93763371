"""Load one checkpoint as a causal language model, or say in one sentence why not.

Used by ``replay`` for every revision and by ``scan`` for a single model. One weight format is chosen before anything
is fetched (safetensors first; pickles only where asked for, and then with ``weights_only=True``), every file belongs
to one resolved commit, remote code runs only where asked for, and a checkpoint whose tensors do not fit the model is
refused, never filled up with random weights.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spectral_monitor.errors import LoadError
from spectral_monitor.replay import hub as hub_module
from spectral_monitor.replay.hub import Hub, RemoteFile

WeightFormat = Literal["safetensors", "pickle", "gguf"]

#: Models of fewer parameters are loaded in float32, larger ones in bfloat16, unless a dtype is asked for.
FLOAT32_BELOW = 2_000_000_000
#: Parameter-name parts that wrappers add: DistributedDataParallel, torch.compile, FSDP, activation checkpointing.
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
#: Buffers that older library versions saved and newer ones compute: harmless where unexpected.
_OLD_BUFFERS = re.compile(
    r"(rotary_emb\.inv_freq|attention\.bias|attention\.masked_bias|attn\.bias|attn\.masked_bias)\Z"
)
#: Everything but weights that loading may need from a repository.
_SMALL_FILES = re.compile(r"[^/]+\.(json|txt|model|tiktoken)\Z")
_CODE_FILES = re.compile(r".+\.py\Z")
_INDEX = {"safetensors": "model.safetensors.index.json", "pickle": "pytorch_model.bin.index.json"}
_SINGLE = {"safetensors": "model.safetensors", "pickle": "pytorch_model.bin"}
_SHARD = {
    "safetensors": re.compile(r"model-\d+-of-\d+\.safetensors\Z"),
    "pickle": re.compile(r"pytorch_model-\d+-of-\d+\.bin\Z"),
}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be measured, and what was loaded.

    Attributes:
        model: the ``transformers`` causal language model, in eval mode.
        tokenizer_special_ids: ids that the tokenizer marks as special, and the configuration's bos, eos and pad;
            sorted. Probe tokens keep away from them.
        tokenizer_size: number of token ids the tokenizer knows (embedding rows beyond it are padding); None when the
            checkpoint has no tokenizer.
        commit: resolved commit of a Hub revision, None for local files.
        dtype: the dtype the weights are in, such as ``"float32"``.
        files: names of the weight files, relative to the checkpoint.
        notes: what was done that one should know, a sentence each.
    """

    model: Any
    tokenizer_special_ids: tuple[int, ...]
    commit: str | None
    dtype: str
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()
    tokenizer_size: int | None = None


@dataclass(frozen=True)
class WeightPlan:
    """Which files of a checkpoint hold its weights, all of one format; ``index`` says which tensor is in which."""

    format: WeightFormat
    files: tuple[str, ...]
    index: str | None = None


def load_model(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    device_map: str | dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    config: str | os.PathLike[str] | None = None,
    hub: Hub | None = None,
) -> LoadedModel:
    """Load a causal language model from a Hub repository, a local folder or a GGUF file.

    Args:
        model: Hub id (``EleutherAI/pythia-160m``), path of a folder that ``save_pretrained``, Trainer or Accelerate
            wrote, or path of a ``.gguf`` file. A path that exists is never looked up on the Hub.
        revision: branch, tag or commit of a Hub repository; resolved to a commit once, all files come from that.
        gguf_file: name of the GGUF file inside the repository or folder.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"auto"`` (as stored); None: float32 below
            ``FLOAT32_BELOW`` parameters, else bfloat16.
        device: where the whole model goes, such as ``"cuda:0"``; ``device_map="auto"`` spreads it instead.
        trust_remote_code: run modelling code that the checkpoint brings along.
        allow_pickle: accept ``.bin`` weights where there are no safetensors (read with ``weights_only=True``).
        config: folder or file of the configuration, for a folder without ``config.json`` (Accelerate states); its
            parent folder is looked into by itself.

    Raises LoadError with one sentence: unknown repository or revision, no weights, damaged or incomplete files,
    unknown architecture, remote code needed, tensors that do not fit the model, unknown dtype or device.
    """
    options = LoadOptions(dtype, device, device_map, trust_remote_code, allow_pickle, config)
    check_options(options)
    source = os.fspath(model)
    path = Path(source).expanduser()
    if path.is_file():
        _no_revision(revision, source)
        if path.suffix.lower() != ".gguf":
            raise LoadError(f"{path} is a file, not a checkpoint: give its folder, or a .gguf file")
        return load_folder(path.parent, options, gguf_file=path.name, where=source)
    if path.is_dir():
        _no_revision(revision, source)
        return load_folder(path, options, gguf_file=gguf_file, where=source)
    if _looks_like_path(source):
        raise LoadError(f"{source} does not exist: give a folder, a .gguf file or a Hub repository (owner/name)")
    return _load_from_hub(source, revision, gguf_file, options, hub or Hub())


@dataclass(frozen=True)
class LoadOptions:
    """How checkpoints are loaded; fields as the arguments of ``load_model``."""

    dtype: str | None = None
    device: str | None = None
    device_map: str | dict[str, Any] | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    config: str | os.PathLike[str] | None = None


_DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")


def check_options(options: LoadOptions) -> None:
    """LoadError where a dtype or device does not exist, before anything is fetched."""
    import torch

    dtype, device, device_map = options.dtype, options.device, options.device_map
    if dtype is not None and dtype not in _DTYPES:
        raise LoadError(f"unknown dtype {dtype!r}: choose one of {', '.join(_DTYPES)}")
    if device is not None and device_map is not None:
        raise LoadError("give device or device_map, not both: device_map decides the device of every layer")
    if device is not None:
        try:
            kind = torch.device(device)
        except RuntimeError:
            raise LoadError(f"unknown device {device!r}: use cpu, cuda, cuda:0, mps ...") from None
        if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
            raise LoadError(f"device {device} is not there: this machine has {torch.cuda.device_count()} CUDA devices")


def _no_revision(revision: str | None, source: str) -> None:
    if revision is not None:
        raise LoadError(f"{source} is on this machine and has no revisions: leave out --revision {revision}")


def _looks_like_path(source: str) -> bool:
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or "\\" in source or source.endswith(".gguf")


# -- the Hub ----------------------------------------------------------------------------------------------------------


def _load_from_hub(
    repo: str, revision: str | None, gguf_file: str | None, options: LoadOptions, hub: Hub
) -> LoadedModel:
    """Fetch the files of one commit into the Hub client's own cache and load them from there."""
    from huggingface_hub import snapshot_download

    commit = hub.commit(repo, revision)
    listing = hub.files(repo, commit)
    where = f"{repo} revision {revision}" if revision else repo
    if not listing:
        raise hub_module.OfflineError(f"{where} (commit {commit[:12]}) is not in the local cache")
    names = [file.path for file in listing]
    plan = choose_weights(names, where, allow_pickle=options.allow_pickle, gguf_file=gguf_file)
    wanted = files_to_fetch(names, plan, code=options.trust_remote_code)
    folder = Path(
        hub.patiently(
            "snapshot",
            repo,
            revision,
            lambda: snapshot_download(
                repo, revision=commit, allow_patterns=[_literal(name) for name in wanted], local_files_only=hub.offline
            ),
        )
    )
    hub_module.remember_ref(repo, revision, commit)
    by_name = {file.path: file for file in listing}
    check_files(folder, [by_name[name] for name in plan.files], where)
    return load_folder(folder, options, gguf_file=gguf_file, where=where, commit=commit)


def _literal(name: str) -> str:
    """A pattern that matches this very name: glob characters in file names are made harmless."""
    return re.sub(r"([\[*?])", r"[\1]", name)


def files_to_fetch(names: Iterable[str], plan: WeightPlan, code: bool) -> list[str]:
    """Everything that loading by ``plan`` needs: weights, index, and the small top-level files (config, tokenizer)."""
    keep = set(plan.files) | ({plan.index} if plan.index else set())
    indexes = set(_INDEX.values())
    for name in names:
        if (_SMALL_FILES.match(name) and name not in indexes) or (code and _CODE_FILES.match(name)):
            keep.add(name)
    return sorted(keep)


# -- which files ------------------------------------------------------------------------------------------------------


def choose_weights(
    names: Iterable[str], where: str, *, allow_pickle: bool = False, gguf_file: str | None = None
) -> WeightPlan:
    """One weight format out of a checkpoint's file names: safetensors, else (where allowed) pickles; or the GGUF.

    Raises LoadError when there are no weights, only pickles without ``allow_pickle``, or no such GGUF file.
    """
    present = set(names)
    ggufs = sorted(name for name in present if name.lower().endswith(".gguf"))
    if gguf_file is not None:
        if gguf_file not in present:
            listed = f": it has {', '.join(ggufs[:5])}" if ggufs else " and no other GGUF file"
            raise LoadError(f"{where} has no file {gguf_file}{listed}")
        return WeightPlan("gguf", (gguf_file,))
    formats: tuple[Literal["safetensors", "pickle"], ...] = ("safetensors", "pickle")
    for kind in formats:
        shards = tuple(sorted(name for name in present if _SHARD[kind].match(name)))
        plan: WeightPlan | None = None
        if _INDEX[kind] in present and (shards or _SINGLE[kind] not in present):
            plan = WeightPlan(kind, shards, _INDEX[kind])
        elif _SINGLE[kind] in present:
            plan = WeightPlan(kind, (_SINGLE[kind],))
        elif shards:
            raise LoadError(f"{where}: shards without their index {_INDEX[kind]}: the checkpoint is incomplete")
        if plan is None:
            continue
        if kind == "pickle" and not allow_pickle:
            raise LoadError(
                f"{where} has only pickled weights ({(plan.files or (_INDEX[kind],))[0]}): allow them with "
                "--allow-pickle (they are read with weights_only=True), or convert them to safetensors"
            )
        return plan
    if ggufs:
        raise LoadError(f"{where} holds GGUF weights: name the file with --gguf-file (for example {ggufs[0]})")
    if "adapter_config.json" in present:
        raise LoadError(f"{where} holds an adapter, not a model: merge it into its base model first")
    raise LoadError(f"{where} holds no weights (no model.safetensors, no pytorch_model.bin, no GGUF file)")


def check_files(folder: Path, files: Sequence[RemoteFile], where: str) -> None:
    """Compare size and SHA-256 of fetched weights with the listing; LoadError names the first that differs."""
    for file in files:
        path = folder / file.path
        if not path.is_file():
            raise LoadError(f"{where}: {file.path} is missing")
        wrong = hub_module.mismatch(path, file)
        if wrong is not None:
            raise LoadError(f"{where}: {file.path} is damaged ({wrong}): delete it and fetch it again")


# -- a folder ---------------------------------------------------------------------------------------------------------


def load_folder(
    folder: Path,
    options: LoadOptions | None = None,
    *,
    gguf_file: str | None = None,
    where: str = "",
    commit: str | None = None,
) -> LoadedModel:
    """Load the checkpoint in ``folder``; arguments and errors as ``load_model``. Nothing is asked of the Hub."""
    options = options or LoadOptions()
    where = where or str(folder)
    names = [path.relative_to(folder).as_posix() for path in folder.iterdir() if path.is_file()]
    plan = choose_weights(names, where, allow_pickle=options.allow_pickle, gguf_file=gguf_file)
    keys = check_weights(folder, plan, where)
    with _quiet():
        return _load(folder, plan, keys, options, where, commit)


def _load(
    folder: Path, plan: WeightPlan, keys: frozenset[str], options: LoadOptions, where: str, commit: str | None
) -> LoadedModel:
    import torch
    from transformers import AutoModelForCausalLM

    notes: list[str] = []
    config = _read_config(folder, plan, options, where, notes)
    _require_causal_lm(config, options, where)
    dtype = options.dtype
    count = _parameters(config, options, where)
    if dtype is None:
        dtype = "float32" if count < FLOAT32_BELOW else "bfloat16"
        notes.append(f"{dtype} by default for {count:,} parameters")
    arguments: dict[str, Any] = {
        "dtype": dtype if dtype == "auto" else getattr(torch, dtype),
        "output_loading_info": True,
        "trust_remote_code": options.trust_remote_code,
    }
    device_map = options.device_map
    if device_map is None and not _fits(options.device, count, dtype):
        device_map = "auto"
        notes.append(f"spread over all devices: {count:,} parameters do not fit {options.device}")
    if device_map is not None:
        arguments["device_map"] = device_map
    wrapper = _wrapper_names(keys)
    auto: Any = AutoModelForCausalLM
    try:
        if plan.format == "gguf":
            loaded = auto.from_pretrained(str(folder), gguf_file=plan.files[0], **arguments)
        elif wrapper:
            notes.append(f"wrapper prefix {' '.join(wrapper)} taken off {len(keys):,} parameter names")
            loaded = _class_of(config).from_pretrained(
                None,
                config=config,
                state_dict=_unwrapped(folder, plan),
                **{name: value for name, value in arguments.items() if name != "trust_remote_code"},
            )
        else:
            loaded = auto.from_pretrained(
                str(folder),
                config=config,
                use_safetensors=plan.format == "safetensors",
                local_files_only=True,
                **arguments,
            )
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(f"{where}: {_reason(error)}") from error
    model, info = loaded
    notes.extend(_require_fitting(model, info, where, plan))
    if plan.format == "gguf":
        notes.append(f"weights taken out of the quantized file {plan.files[0]}")
    if options.device is not None and device_map is None:
        try:
            model = model.to(options.device)
        except (RuntimeError, AssertionError) as error:
            raise LoadError(f"{where}: cannot be moved to {options.device} ({_reason(error)})") from error
    model.eval()
    ids, size = special_ids(folder, config, plan.files[0] if plan.format == "gguf" else None)
    if size is None:
        notes.append("no tokenizer in the checkpoint: special ids taken from the configuration alone")
    name = str(next(model.parameters()).dtype).removeprefix("torch.")
    return LoadedModel(model, ids, commit, name, plan.files, tuple(notes), size)


def check_weights(folder: Path, plan: WeightPlan, where: str) -> frozenset[str]:
    """Check that the weight files are whole and agree with their index; returns the tensor names (empty for GGUF).

    Reads headers only. Raises LoadError: empty or cut files, shards missing, tensors that the index names and no
    shard holds.
    """
    indexed: dict[str, str] = {}
    if plan.index is not None:
        try:
            indexed = dict(json.loads((folder / plan.index).read_text())["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LoadError(f"{where}: {plan.index} cannot be read ({_reason(error)})") from error
        missing = sorted(set(indexed.values()) - set(plan.files))
        if missing:
            raise LoadError(f"{where}: shard {missing[0]} is named in {plan.index} and is not there")
    present: set[str] = set()
    for name in plan.files:
        if not (folder / name).stat().st_size:
            raise LoadError(f"{where}: {name} is empty: the checkpoint is incomplete")
        if plan.format == "gguf":
            continue
        present.update(_tensor_names(folder / name, plan.format, where))
    lost = sorted(set(indexed) - present)
    if lost:
        raise LoadError(f"{where}: tensor {lost[0]} is named in {plan.index} and in no shard")
    return frozenset(present)


def _tensor_names(path: Path, kind: WeightFormat, where: str) -> Iterable[str]:
    if kind == "safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="pt") as handle:
                return list(handle.keys())
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{where}: {path.name} is cut off or damaged ({_reason(error)})") from error
    return _read_pickle(path, where).keys()


def _read_pickle(path: Path, where: str) -> dict[str, Any]:
    """The state dict in a ``.bin`` file, memory-mapped where the file allows it; never runs pickled code."""
    import pickle
    import zipfile

    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise LoadError(f"{where}: {path.name} cannot be read as plain weights ({_reason(error)})") from error
    if not isinstance(state, dict):
        raise LoadError(f"{where}: {path.name} holds no state dict but a {type(state).__name__}")
    return state


def _wrapper_names(keys: frozenset[str]) -> tuple[str, ...]:
    """Which wrappers' names stand in the parameter names, in the order of ``WRAPPERS``."""
    if not keys:
        return ()
    found = []
    for wrapper in WRAPPERS:
        if wrapper == "module.":
            inside = all(_without(key, WRAPPERS[1:]).startswith(wrapper) for key in keys)
        else:
            inside = any(wrapper in key for key in keys)
        if inside:
            found.append(wrapper)
    return tuple(found)


def _without(key: str, wrappers: Iterable[str]) -> str:
    for wrapper in wrappers:
        key = key.replace(wrapper, "")
    return key


def _unwrapped(folder: Path, plan: WeightPlan) -> dict[str, Any]:
    from safetensors.torch import load_file

    state: dict[str, Any] = {}
    for name in plan.files:
        part = (
            load_file(str(folder / name)) if plan.format == "safetensors" else _read_pickle(folder / name, str(folder))
        )
        for key, value in part.items():
            plain = _without(key, WRAPPERS[1:])
            while plain.startswith("module."):
                plain = plain.removeprefix("module.")
            state[plain] = value
    return state


def _read_config(folder: Path, plan: WeightPlan, options: LoadOptions, where: str, notes: list[str]) -> Any:
    from transformers import AutoConfig

    if plan.format == "gguf":
        source, arguments = folder, {"gguf_file": plan.files[0]}
        try:
            import gguf  # noqa: F401
        except ImportError:
            raise LoadError(f"{where}: reading GGUF files needs the gguf package: pip install gguf") from None
    else:
        source, arguments = _config_folder(folder, options, where, notes), {}
    try:
        return AutoConfig.from_pretrained(str(source), trust_remote_code=options.trust_remote_code, **arguments)
    except Exception as error:
        raise LoadError(f"{where}: {_config_reason(source, error, options)}") from error


def _config_folder(folder: Path, options: LoadOptions, where: str, notes: list[str]) -> Path:
    """Folder with the ``config.json`` to use: the checkpoint's own, the one asked for, or its parent's."""
    if options.config is not None:
        asked = Path(options.config)
        asked = asked.parent if asked.name == "config.json" else asked
        if not (asked / "config.json").is_file():
            raise LoadError(f"{asked} holds no config.json: give the folder of the model's configuration")
        return asked
    if (folder / "config.json").is_file():
        return folder
    if (folder.parent / "config.json").is_file():
        notes.append("config.json taken from the parent folder")
        return folder.parent
    raise LoadError(
        f"{where} has no config.json (nor has its parent folder): give the model's configuration with --config FOLDER"
    )


def _config_reason(folder: Path, error: Exception, options: LoadOptions) -> str:
    """Why a configuration cannot be read: remote code, unknown model type, or no JSON."""
    import transformers

    try:
        raw = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return f"its configuration cannot be read ({_reason(error)})"
    if raw.get("auto_map") and not options.trust_remote_code:
        return (
            f"its configuration needs code that it brings along (model type {raw.get('model_type')!r}): "
            "read that code, then allow it with --trust-remote-code"
        )
    if raw.get("model_type") is None:
        return "its config.json names no model_type"
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if raw["model_type"] not in CONFIG_MAPPING:
        return f"transformers {transformers.__version__} does not know its model type {raw['model_type']!r}"
    return f"its configuration cannot be read ({_reason(error)})"


def _class_of(config: Any) -> Any:
    """The causal-LM class of a configuration that the library itself knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _require_causal_lm(config: Any, options: LoadOptions, where: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    remote = getattr(config, "auto_map", None) or {}
    if "AutoModelForCausalLM" in remote and options.trust_remote_code:
        return
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise LoadError(
            f"{where}: a {config.model_type!r} model is no causal language model, there is nothing to probe"
        )


def _parameters(config: Any, options: LoadOptions, where: str) -> int:
    """Number of parameters of the model that ``config`` describes, built without memory."""
    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = auto.from_config(config, trust_remote_code=options.trust_remote_code)
    except Exception as error:
        raise LoadError(f"{where}: a model of this configuration cannot be built ({_reason(error)})") from error
    return sum(parameter.numel() for parameter in model.parameters())


def _fits(device: str | None, parameters: int, dtype: str) -> bool:
    """Whether the weights go onto a CUDA device with a fifth of its free memory left for activations."""
    import torch

    if device is None or torch.device(device).type != "cuda":
        return True
    item = {"float32": 4, "float64": 8}.get(dtype, 2)
    free, _ = torch.cuda.mem_get_info(torch.device(device))
    return parameters * item <= 0.8 * free


def _require_fitting(model: Any, info: dict[str, Any], where: str, plan: WeightPlan) -> list[str]:
    """Refuse a model whose weights are not all from the checkpoint; returns notes on what was harmless.

    Missing, unexpected and mismatched keys stop the checkpoint; tied weights and buffers that older versions saved
    are no fault.
    """
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    missing = sorted(set(info.get("missing_keys", ())) - tied)
    unexpected = sorted(info.get("unexpected_keys", ()))
    old = [key for key in unexpected if _OLD_BUFFERS.search(key)]
    unexpected = [key for key in unexpected if key not in set(old)]
    mismatched = sorted(str(item[0]) if isinstance(item, tuple) else str(item) for item in info["mismatched_keys"])
    errors = [*info.get("error_msgs", ())]
    faults = [
        f"{len(keys)} {what} (first: {keys[0]})"
        for what, keys in (
            ("missing in the checkpoint", missing),
            ("unknown to the model", unexpected),
            ("of another shape than the model's", mismatched),
        )
        if keys
    ]
    if faults:
        raise LoadError(f"{where}: the tensors do not fit a {type(model).__name__}: {', '.join(faults)}")
    if errors:
        raise LoadError(f"{where}: {errors[0]}")
    return [f"{len(old)} buffers of older library versions left out (first: {old[0]})"] if old else []


def special_ids(folder: Path, config: Any, gguf_file: str | None = None) -> tuple[tuple[int, ...], int | None]:
    """Special token ids of a checkpoint and the number of ids its tokenizer knows (None without a tokenizer).

    Read from ``tokenizer.json`` and ``tokenizer_config.json`` (or the GGUF's token types) without building a
    tokenizer; the configuration's bos, eos and pad ids are added.
    """
    ids: set[int] = set()
    size: int | None = None
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, name, None)
        ids.update(int(item) for item in (value if isinstance(value, (list, tuple)) else [value]) if item is not None)
    if gguf_file is not None:
        kinds = _gguf_token_types(folder / gguf_file)
        # llama.cpp token types: 3 = control, 4 = user defined, 5 = unused, 2 = unknown.
        ids.update(position for position, kind in enumerate(kinds) if kind in (2, 3, 5))
        size = len(kinds) or None
    else:
        tokenizer = _json(folder / "tokenizer.json")
        settings = _json(folder / "tokenizer_config.json")
        added = [item for item in tokenizer.get("added_tokens", ()) if isinstance(item, dict)]
        ids.update(int(item["id"]) for item in added if item.get("special"))
        known = settings.get("added_tokens_decoder") or {}
        ids.update(int(key) for key, item in known.items() if isinstance(item, dict) and item.get("special"))
        vocabulary = (tokenizer.get("model") or {}).get("vocab") or _json(folder / "vocab.json")
        if vocabulary:
            base = len(vocabulary)
            highest = max((int(item["id"]) for item in added), default=-1)
            size = max(base, highest + 1)
    return tuple(sorted(item for item in ids if item >= 0)), size


def _gguf_token_types(path: Path) -> list[int]:
    from gguf import GGUFReader

    field = GGUFReader(str(path)).fields.get("tokenizer.ggml.token_type")
    return [int(field.parts[index][0]) for index in field.data] if field is not None else []


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


class _quiet:
    """Keep transformers' progress bars and loading reports off the terminal while a checkpoint loads."""

    def __enter__(self) -> None:
        self._logging: Any = _transformers_logging()
        logging = self._logging
        self._bars = logging.is_progress_bar_enabled()
        self._level = logging.get_verbosity()
        logging.disable_progress_bar()
        logging.set_verbosity_error()

    def __exit__(self, *_: object) -> None:
        logging = self._logging
        logging.set_verbosity(self._level)
        if self._bars:
            logging.enable_progress_bar()


def _transformers_logging() -> Any:
    from transformers.utils import logging

    return logging


def _reason(error: BaseException) -> str:
    """The first line of an error, with its type where the line alone says little."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else ""
    return first if len(first) > 40 else f"{type(error).__name__}: {first}".rstrip(": ")
