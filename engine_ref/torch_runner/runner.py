"""The runner of a real model: one forward over all tokens of a planned step, then a token for whoever is due one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvhash._errors import InvalidPromptEmbedsError, InvalidTokenError, KvHashError
from kvhash.extra_keys import Lora

from ..coordinator import CacheConfig
from ..ngram import NgramDrafter
from ..request import Request
from ..scheduler import StepPlan
from ..spec import GroupSpec, MambaSpec
from .attention import AttentionBackend, PlainAttention
from .errors import UnsupportedModelError
from .families import group_layers
from .forward import Forward, choose_graphs
from .images import Images
from .layout import BatchLayout, StepSequence, lay_out
from .loading import DTYPES, LoadedModel, load_model
from .lora import LoraAdapters
from .pages import PagedCache
from .sampler import choose_tokens, report_logprobs
from .states import state_shape, use_paged_states

__all__ = ["TorchRunner"]

_NOT_NUMBERS = "the model's logits are not numbers (NaN); its weights or the prompt's embeddings are broken"


@dataclass(slots=True)
class _Row:
    """What the runner knows of a request: how much is really computed, and its block tables by group."""

    request: Request
    computed: int
    tables: list[list[int]]


class TorchRunner:
    """Runs a loaded model on pages of its own.

    `num_blocks`: pages, the null block included. `drafter`: proposes the drafts that async scheduling planned as
    placeholders. `attention`: ``"plain"`` or ``"triton"`` (CUDA only, and the default there). `graphs`: for decodes,
    ``"cuda"`` (the default with Triton), ``"off"``, or ``"repeat"`` for tests. `compile_backend`: of torch.compile,
    None: not compiled. Raises UnsupportedModelError.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int,
        block_size: int = 16,
        drafter: NgramDrafter | None = None,
        attention: str | None = None,
        graphs: str | None = None,
        compile_backend: str | None = None,
    ) -> None:
        self.loaded = loaded
        self.num_blocks = num_blocks
        self.drafter = drafter
        self.layer_groups = group_layers(loaded.config, block_size=block_size)
        self.adapters = LoraAdapters(loaded.model)
        self.images = Images(loaded)
        self.vocab_size = int(loaded.config.vocab_size)
        self._has_states = any(isinstance(spec, MambaSpec) for spec in self.groups)
        if self._has_states and drafter is not None:
            raise UnsupportedModelError(
                "drafts need a cache that can go back; the recurrent states of this model cannot"
            )
        attention = attention or ("triton" if loaded.device.type == "cuda" else "plain")
        backend = _backend(attention, loaded)
        graphs = choose_graphs(graphs, attention=attention, groups=self.layer_groups)
        # Rows that pad a graph's batch write to one page more, which the engine does not know of.
        self.cache = self._make_cache(num_blocks + (graphs != "off"))
        self.forward = Forward(
            loaded, self.layer_groups, backend, self.cache, compile_backend=compile_backend, graphs=graphs
        )
        self._rows: dict[str, _Row] = {}

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        num_blocks: int,
        dtype: str = "float32",
        device: str = "cpu",
        adapters: Mapping[str, str | Path] | None = None,
        **options: Any,
    ) -> TorchRunner:
        """Load a model folder or hub id and its adapters, by name; raises ModelError."""
        runner = cls(load_model(source, dtype=dtype, device=device), num_blocks=num_blocks, **options)
        for name, folder in (adapters or {}).items():
            runner.adapters.load(name, folder)
        return runner

    # ---- what the engine is built from

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """The KV cache groups of the model."""
        return tuple(group.spec for group in self.layer_groups)

    def cache_config(self, *, max_model_len: int | None = None, **options: Any) -> CacheConfig:
        """Return the geometry that fits this runner; `max_model_len`: at most, and else, the model's own limit."""
        limit = int(self.loaded.config.max_position_embeddings)
        size = self.groups[0].block_size
        return CacheConfig(
            groups=self.groups,
            num_blocks=self.num_blocks,
            hash_block_size=size,
            scheduler_block_size=size,
            max_model_len=limit if max_model_len is None else min(max_model_len, limit),
            **options,
        )

    def validate(self, request: Request) -> None:
        """Raise what is wrong with a request for this model, before it is queued: UsageError kinds."""
        if request.lora is not None:
            self.adapters.check(_adapter_name(request.lora))
        self.images.check(request.chain.keys.multimodal)
        embeds = request.chain.keys.prompt_embeds
        hidden = int(self.loaded.config.hidden_size)
        if embeds is not None and embeds.shape[1] != hidden:
            raise InvalidPromptEmbedsError(
                f"the rows have {embeds.shape[1]} values, the model's hidden size is {hidden}",
                at="$.prompt_embeds.shape[1]",
            )
        for index, token in enumerate(request.all_token_ids):
            if not 0 <= token < self.vocab_size:
                raise InvalidTokenError(
                    f"token {token} is out of the vocabulary of {self.vocab_size}", at=f"$.tokens[{index}]"
                )

    # ---- pages, as connectors move them

    @property
    def page_fingerprint(self) -> str:
        """What a page depends on beside its block hash: weights, dtype, and which layers lie in it how."""
        layout = repr([(group.spec, group.layers) for group in self.layer_groups])
        return hashlib.sha256(f"{self.loaded.fingerprint}:{layout}".encode()).hexdigest()[:32]

    def read_page(self, group: int, block_id: int) -> bytes:
        """Return a block's page."""
        return self.cache.read_page(group, block_id)

    def write_page(self, group: int, block_id: int, page: bytes) -> None:
        """Fill a block with a page."""
        self.cache.write_page(group, block_id, page)

    # ---- a step

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> dict[str, list[int]]:
        """Compute a planned step; see `ModelRunner`."""
        with torch.inference_mode():
            self.cache.moves.join()
            self.cache.drop_nan(self._take_in(plan, requests))
            self.cache.copy_blocks(plan.block_copies)
            drafts: dict[str, list[int]] = {}
            sequences = [
                self._sequence(request_id, count, plan, drafts)
                for request_id, count in plan.num_scheduled_tokens.items()
                if request_id in self._rows and not self._rows[request_id].request.error
            ]
            if not sequences:
                return {}
            layout = lay_out(
                sequences, block_sizes=[g.block_size for g in self.groups], device=self.loaded.device
            )
            return self._sample(layout, self._forward(layout), plan, drafts)

    def _take_in(self, plan: StepPlan, requests: Mapping[str, Request]) -> list[int]:
        """Bring the rows up to the plan; returns the blocks that are new to their request and stay partly unwritten.

        The plain attention reads whole blocks and masks what lies beyond a sequence.
        """
        held = {request_id: [len(table) for table in row.tables] for request_id, row in self._rows.items()}
        # What is planned and not among `requests` must not be run; it comes again with its whole table.
        for request_id in (*plan.preempted, *(i for i in plan.num_scheduled_tokens if i not in requests)):
            self._rows.pop(request_id, None)
        gone = [i for i, row in self._rows.items() if row.request.status.is_finished]
        for request_id in gone:
            if request_id not in plan.num_scheduled_tokens:
                del self._rows[request_id]
        for new in plan.new_requests:
            request = requests.get(new.request_id)
            if request is None:
                continue
            row = _Row(request, new.num_computed_tokens, [list(ids) for ids in new.block_ids])
            self._rows[new.request_id] = row
            try:
                self.validate(request)
            except KvHashError as error:
                request.error = str(error)
        for cached in plan.cached_requests:
            tables = cached.new_block_ids
            request = requests.get(cached.request_id)
            if request is None:
                continue
            if cached.resumed:
                assert tables is not None
                self._rows[cached.request_id] = _Row(
                    request, cached.num_computed_tokens, [list(ids) for ids in tables]
                )
            elif tables is not None and cached.request_id in self._rows:
                for table, ids in zip(self._rows[cached.request_id].tables, tables, strict=True):
                    table += ids
        whole = {request.request_id for request in plan.new_requests}
        whole |= {request.request_id for request in plan.cached_requests if request.resumed}
        partly: set[int] = set()
        for request_id, count in plan.num_scheduled_tokens.items():
            if request_id not in self._rows:
                continue
            row = self._rows[request_id]
            for group, (spec, table) in enumerate(zip(self.groups, row.tables, strict=True)):
                known = 0 if request_id in whole else held[request_id][group]
                if not isinstance(spec, MambaSpec) and len(table) > known:
                    partly.update(table[max(known, (row.computed + count) // spec.block_size) :])
        return sorted(partly - {0})

    def _sequence(
        self, request_id: str, count: int, plan: StepPlan, drafts: dict[str, list[int]]
    ) -> StepSequence:
        row = self._rows[request_id]
        request, known = row.request, row.request.all_token_ids
        planned = list(plan.spec_token_ids.get(request_id, ()))
        if self.drafter is not None and -1 in planned:
            # Placeholders: when the step was planned nobody knew the tokens that drafts follow.
            planned = (self.drafter.propose(known) + planned)[: len(planned)]
        tokens = [*known[row.computed : row.computed + count], *(max(token, 0) for token in planned)][:count]
        tokens += [0] * (count - len(tokens))  # a request that ended before its last planned step came up
        rows = 1 + len(planned) if plan.samples.get(request_id) else 0
        if planned:
            drafts[request_id] = planned
        wants_prompt = (
            request.sampling.prompt_logprobs is not None and row.computed < request.num_prompt_tokens
        )
        return StepSequence(
            request_id, row.computed, tokens, row.tables, count if wants_prompt else min(rows, count)
        )

    def _forward(self, layout: BatchLayout) -> torch.Tensor:
        adapters, embeds = self._adapter_rows(layout), self._embeds(layout)
        self.adapters.use(adapters)
        return self.forward.logits(layout, embeds, plain=not adapters and embeds is None)

    def _adapter_rows(self, layout: BatchLayout) -> list[tuple[str, list[int]]]:
        rows: dict[str, list[int]] = {}
        for index, sequence in enumerate(layout.sequences):
            lora = self._rows[sequence.request_id].request.lora
            if lora is not None:
                rows.setdefault(_adapter_name(lora), []).extend(
                    range(layout.offsets[index], layout.offsets[index + 1])
                )
        return list(rows.items())

    def _embeds(self, layout: BatchLayout) -> torch.Tensor | None:
        """Return the step's embeddings where a request brought its own, or an image, for some of its tokens."""
        brought: list[tuple[int, torch.Tensor]] = []
        for index, sequence in enumerate(layout.sequences):
            request = self._rows[sequence.request_id].request
            embeds = request.chain.keys.prompt_embeds
            end = min(sequence.end, request.num_prompt_tokens)
            shift = layout.offsets[index] - sequence.start
            images = self.images.rows(request.chain.keys.multimodal, sequence.start, sequence.end)
            brought += [(first + shift, rows) for first, rows in images]
            if embeds is None or sequence.start >= end:
                continue
            data = bytearray(embeds.rows(sequence.start, end))
            dtype = torch.float16 if embeds.dtype == "float16" else DTYPES[embeds.dtype]
            rows = torch.frombuffer(data, dtype=dtype).view(-1, embeds.shape[1])
            brought.append((layout.offsets[index], rows))
        if not brought:
            return None
        embedding = self.loaded.model.get_input_embeddings()(layout.token_ids)
        for first, rows in brought:
            embedding[first : first + len(rows)] = rows.to(embedding)
        return embedding[None]

    def _sample(
        self, layout: BatchLayout, logits: torch.Tensor, plan: StepPlan, drafts: dict[str, list[int]]
    ) -> dict[str, list[int]]:
        bad = set(logits.isnan().any(dim=-1).nonzero().flatten().tolist())
        first, due, positions = 0, [], []
        for sequence in layout.sequences:
            row = self._rows[sequence.request_id]
            rows = range(first, first + sequence.logit_rows)
            first = rows.stop
            row.computed = sequence.end
            if not bad.isdisjoint(rows):
                row.request.error = _NOT_NUMBERS
                continue
            self._report_prompt(row.request, sequence, logits[rows.start : rows.stop])
            if plan.samples.get(sequence.request_id):
                planned = drafts.get(sequence.request_id, [])
                rows = rows[len(rows) - 1 - len(planned) :]
                due.append((sequence.request_id, planned, rows))
                positions += [(row.request, row.request.num_tokens + i) for i in range(len(rows))]
        if not due:
            return {}
        index = torch.tensor([row for _, _, rows in due for row in rows], device=logits.device)
        wanted = logits if len(index) == len(logits) else logits.index_select(0, index)
        chosen, sampled, at = choose_tokens(wanted, positions), {}, 0
        for request_id, planned, rows in due:
            tokens = _accept(chosen[at : at + len(rows)], planned)
            at += len(rows)
            sampled[request_id] = tokens
            row = self._rows[request_id]
            row.computed -= len(planned) - (len(tokens) - 1)
            self._report(row.request, tokens, logits[rows.start : rows.start + len(tokens)])
        return sampled

    def _report(self, request: Request, tokens: Sequence[int], logits: torch.Tensor) -> None:
        if request.sampling.logprobs is not None:
            for i, report in enumerate(report_logprobs(logits, tokens, request.sampling.logprobs)):
                request.logprobs[request.num_tokens + i] = report

    def _report_prompt(self, request: Request, sequence: StepSequence, logits: torch.Tensor) -> None:
        count = request.sampling.prompt_logprobs
        first = sequence.start + 1  # a token's logits are for the one after it
        end = min(sequence.end + 1, request.num_prompt_tokens)
        if count is None or first >= end:
            return
        tokens = request.all_token_ids[first:end]
        for i, report in enumerate(report_logprobs(logits[: end - first], tokens, count)):
            request.logprobs[first + i] = report

    def _make_cache(self, num_blocks: int) -> PagedCache:
        config = self.loaded.config
        heads, states = {}, {}
        for group in self.layer_groups:
            for layer in group.layers:
                module = self.loaded.layers[layer]
                if isinstance(group.spec, MambaSpec):
                    use_paged_states(module.linear_attn)
                    states[layer] = state_shape(module.linear_attn)
                else:
                    heads[layer] = (int(config.num_key_value_heads), int(module.self_attn.head_dim))
        return PagedCache(
            self.layer_groups,
            num_blocks=num_blocks,
            head_shapes=heads,
            state_shapes=states,
            dtype=self.loaded.dtype,
            device=self.loaded.device,
        )


def _adapter_name(lora: Lora) -> str:
    """Return the name under which an adapter is loaded; early releases know adapters by number only."""
    return lora.name if lora.name is not None else str(lora.id)


def _accept(chosen: list[int], drafts: Sequence[int]) -> list[int]:
    """Return the chosen tokens up to the first that is not the draft in its place."""
    for index, draft in enumerate(drafts):
        if chosen[index] != draft:
            return chosen[: index + 1]
    return chosen


def _backend(name: str, loaded: LoadedModel) -> AttentionBackend:
    if name == "plain":
        return PlainAttention(loaded.dtype)
    if name == "triton":
        if loaded.device.type != "cuda":
            raise UnsupportedModelError("the Triton kernels need a CUDA device; use attention='plain'")
        from .attention_triton import TritonAttention

        return TritonAttention()
    raise UnsupportedModelError(f"unknown attention {name!r}; expected plain or triton")
