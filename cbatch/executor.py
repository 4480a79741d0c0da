"""Builds what a step runs on, and owns it: buffers, pages, the runner, the lane, and the graphs where there are some.

Knows a model and a config; knows no request, and nothing of when a step is launched.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from cbatch.buffers import IOBuffer, eager_bucket
from cbatch.config import EngineConfig
from cbatch.errors import ConfigError, UnsupportedModelError
from cbatch.graphs import Buckets, CaptureError, GraphSet
from cbatch.host_pages import HostPages, num_host_blocks
from cbatch.kernels.attention import AttentionBackend, make_backend
from cbatch.kv_cache import KVCache
from cbatch.models.base import Model
from cbatch.prompt_logprobs import PromptRows
from cbatch.runner import Runner
from cbatch.sampler import NUM_PARAMS, Edit
from cbatch.scheduler.kv_spec import KVGroup
from cbatch.scheduler.plan import Bucket, StepPlan, StepShape
from cbatch.slot_state import Admission
from cbatch.streams import CpuLane, CudaLane, Lane

_log = logging.getLogger(__name__)


def suitable_backend(config: EngineConfig, model: Model, groups: tuple[KVGroup, ...]) -> AttentionBackend:
    """The attention that was asked for. Raises ConfigError or UnsupportedModelError where it cannot serve the model."""
    try:
        backend = make_backend(config.attention, model.device)
    except (ValueError, ImportError) as error:
        raise ConfigError(str(error)) from error
    head_dim = max(max(group.spec.k_head_dim, group.spec.v_head_dim) for group in groups)
    if head_dim > backend.max_head_dim:
        raise UnsupportedModelError(
            f"{model.name}: heads of {head_dim}, but the kernels take up to {backend.max_head_dim}; "
            'attention="torch" takes any, slowly'
        )
    return backend


class Executor:
    """Runs steps: by replaying a CUDA graph, or kernel by kernel. Captures the graphs when it is made."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        groups: tuple[KVGroup, ...],
        backend: AttentionBackend,
        max_blocks_per_seq: int,
        max_spare_words: int,
    ) -> None:
        """Allocates all memory of the engine but the weights. ``config`` is resolved, ``num_blocks`` included."""
        assert config.num_blocks and config.max_model_len and config.max_num_batched_tokens and config.depth
        cuda = model.device.type == "cuda"
        graphed = cuda and not config.enforce_eager and model.capturable and backend.capturable
        shape = StepShape(len(groups), config.block_size, NUM_PARAMS)
        limit = Bucket(config.max_num_batched_tokens, config.max_num_seqs)
        buckets = Buckets(limit.num_tokens, limit.num_rows)
        choose = buckets.choose if graphed else eager_bucket(limit)
        self.buffers = [
            IOBuffer(shape, limit, choose, model.device, max_spare_words, model.vocab_size) for _ in range(config.depth)
        ]
        self._runner = Runner(
            model,
            KVCache(groups, config.num_blocks, config.block_size, model.dtype, model.device, backend),
            backend,
            num_groups=len(groups),
            max_num_seqs=config.max_num_seqs,
            max_blocks_per_seq=max_blocks_per_seq,
        )
        self._host_pages: HostPages | None = None
        self.swap_ms_per_block = 0.0
        if num_blocks := num_host_blocks(config, model, groups):
            self._host_pages = HostPages(self._runner.kv_cache, num_blocks)
            self.swap_ms_per_block = self._host_pages.measure_ms()
        self._graphs: GraphSet | None = None
        self.lane: Lane
        if cuda:
            self.lane = lane = CudaLane(self.buffers, model.device)
            if graphed:
                try:
                    self._graphs = GraphSet(self._runner, buckets, shape, config.max_model_len, lane.compute)
                except CaptureError as error:
                    _log.warning("%s: steps are launched eagerly, since %s", model.name, error)
                except BaseException:
                    lane.close()
                    raise
        else:
            self.lane = CpuLane(self.buffers)
        self.step_sizes = buckets.mixed if self._graphs else ()  # what the tokens of mixed steps are padded to
        self._run = self._graphs.launch if self._graphs else self._runner.run
        self._finish = self._graphs.finish if self._graphs else self._runner.finish

    def compute(
        self,
        io: IOBuffer,
        plan: StepPlan,
        admissions: Sequence[Admission] = (),
        prompts: PromptRows | None = None,
    ) -> None:
        """Launch a step on the current stream; of a HELD step, only what computes its logits.

        ``admissions``: those of the plan's ``admitted`` whose flags have PROCESSED.
        """
        if admissions:
            self._runner.slot_state.apply(admissions)
        if self._host_pages is not None:
            self._host_pages.before_step(plan.swaps)
        if io.num_spare_words:
            self._runner.take_spare(io.spare_words, plan.sizes)
        if prompts is None:
            self._run(io, plan)
        else:
            self._runner.run(io, plan, prompts)

    def sample(
        self, io: IOBuffer, plan: StepPlan, num_masks: int, edits: Sequence[Edit], prompts: PromptRows | None = None
    ) -> None:
        """Launch the rest of a HELD step: apply ``num_masks`` of the buffer's masks and the ``edits``, then sample."""
        if num_masks:
            self._runner.slot_state.set_masks(*io.masks.on_device(num_masks))
        if prompts is None:
            self._finish(io, plan, edits)
        else:
            self._runner.finish(io, plan, edits)

    def graph_facts(self) -> dict[str, Any]:
        """For ``Engine.stats``: the number of graphs, their MiB in all and for one more bucket; those of the slots."""
        graphs = self._graphs
        return {
            "num_graphs": len(graphs) if graphs else 0,
            "graph_mib": graphs.num_bytes / 2**20 if graphs else 0.0,
            "graph_mib_per_bucket": graphs.bytes_per_bucket / 2**20 if graphs else 0.0,
            "slot_state_mib": self._runner.slot_state.num_bytes / 2**20,
        }
