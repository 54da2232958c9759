"""flash-attn-4 4.0.0b36 behind typed thin functions: the only module that imports it.

Its internals move with every release, so the version, signatures and fields used here are checked
once, at import; importing raises ConfigError where they do not fit. Import it where it is used.

The library has no deterministic backward pass over block lists on compute capability 9.0.
BackwardInTurns is its kernel with two methods replaced: each key block adds to a block of query
gradients in the turn that its list gives, and one ascending list holds masked and full blocks.
Everything else, on the host too, is the library's.

Legend: P rows, H query heads, G key heads, D key width, V value width, M query blocks, N key
blocks.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from harts.ops.attention.block_lists import BlockList, QueuedLists
from harts.ops.pinned_library import PinnedLibrary

_LIBRARY = PinnedLibrary(
    "flash-attn-4",
    "4.0.0b36",
    'tree_attention: impl "fa4"',
    "pip install flash-attn-4==4.0.0b36, or flash-attn-4[cu13]==4.0.0b36 for CUDA 13",
)
_LIBRARY.check_release()
try:
    import cutlass
    from cutlass import cute
    from flash_attn.cute import barrier, copy_utils, interface, utils
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.cache_utils import get_jit_cache
    from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
    from flash_attn.cute.mask import AttentionMask
    from flash_attn.cute.named_barrier import NamedBarrierBwd
    from quack import layout_utils
except ImportError as error:
    raise _LIBRARY.not_importable(error) from error

_SHARED = {"softmax_scale", "mask_mod", "block_sparse_tensors", "aux_tensors"}
_STORE_PARAMETERS = {
    "mdQaccum",
    "sdQaccum",
    "block_info",
    "TileSchedulerCls",
    "SeqlenInfoCls",
    "blocksparse_tensors",
    "mdQ_semaphore",
}
_BLOCK_PARAMETERS = {
    "m_block",
    "consumer_state_Q",
    "consumer_state_dO",
    "mask_fn",
    "score_mod_fn",
    "score_mod_bwd_fn",
    "dKV_accumulate",
}
_USES: list[tuple[Callable[..., Any], set[str]]] = [
    (interface._flash_attn_fwd, {"q", "k", "v", "return_lse", "pack_gqa", *_SHARED}),
    (
        interface._flash_attn_bwd,
        {"q", "k", "v", "out", "dout", "lse", "deterministic", *_SHARED},
    ),
    (FlashAttentionBackwardSm90.dQaccum_store, {"self", *_STORE_PARAMETERS}),
    (
        FlashAttentionBackwardSm90.mma,
        {"self", "TileSchedulerCls", "aux_data", "blocksparse_tensors"},
    ),
    (FlashAttentionBackwardSm90.mma_one_m_block, {"self", *_BLOCK_PARAMETERS}),
    (AttentionMask.apply_mask, {"n_block", "thr_mma", "aux_data"}),
    (copy_utils.cpasync_reduce_bulk_add_f32, {"smem_ptr", "gmem_ptr", "store_bytes"}),
]
_LIBRARY.check_parameters(_USES)
_LIBRARY.check_names(
    "BlockSparseTensorsTorch",
    {"block_size", "dq_write_order", "dq_write_order_full", "spt"},
    set(BlockSparseTensorsTorch._fields),
)


@cute.jit
def _visible(batch, head, query, key, lengths, aux):  # type: ignore[no-untyped-def]
    """key <= query < end[key], elementwise; defined once, as it belongs to a compilation."""
    end = utils.scalar_to_ssa(aux[0][key[0]], cutlass.Int32)
    return (key <= query) & (query < end)


class _Consecutive:
    """In place of a list's indices, for any batch, head and key block: first, first + 1, ..."""

    def __init__(self, first: cutlass.Int32) -> None:
        self.first = first

    def __getitem__(self, place: Any) -> Any:
        return self if isinstance(place, tuple) else self.first + place


class BackwardInTurns(FlashAttentionBackwardSm90):  # type: ignore[misc]
    """The library's kernel for compute capability 9.0, adding to query gradients in turns.

    Key blocks start from the last to the first and take their turns in that order, so whoever
    holds a turn has started, and nobody waits for one that has not.

    All query blocks of a key block are in its list of masked blocks, ascending. Two key blocks
    then visit what they share in the same order, the one with the earlier turn ahead, and hardly
    wait. Masked blocks first, as the library has it, would send a key block to the end of its
    range, to wait there for turns that are due last. The second auxiliary tensor is
    QueuedLists.whole_until, by which blocks that need no mask are known. The listed blocks follow
    one another: a row sees itself, so the queries that see one of some consecutive keys are all
    rows from the first key to the largest end.
    """

    @property
    def spt(self) -> bool:
        """Whether the last key block starts first: the library ties that to a causal mask."""
        return True

    @spt.setter
    def spt(self, value: bool) -> None:
        pass

    def mma(self, *args: Any, **options: Any) -> None:
        """What the computing warps do, with all that they need to know of their one key block.

        Every poll for a turn empties the first-level cache, so nothing is loaded in the loop.
        """
        given = inspect.signature(FlashAttentionBackwardSm90.mma).bind(self, *args, **options)
        n_block, *_ = given.arguments["TileSchedulerCls"]().initial_work_tile_info().tile_idx
        end, whole_until = given.arguments["aux_data"].tensors
        given.arguments["aux_data"] = utils.AuxData((end,), (whole_until[n_block],))
        queries = _Consecutive(self._first_query_block(n_block))
        lists = given.arguments["blocksparse_tensors"]
        given.arguments["blocksparse_tensors"] = lists._replace(mask_block_idx=queries)
        FlashAttentionBackwardSm90.mma(*given.args, **given.kwargs)

    def _first_query_block(self, n_block: cutlass.Int32) -> cutlass.Int32:
        return n_block * self.tile_n // self.tile_m

    @cute.jit  # type: ignore[untyped-decorator]
    def mma_one_m_block(
        self,
        m_block: cutlass.Int32,
        consumer_state_Q: Any,
        consumer_state_dO: Any,
        mask_fn: Any = None,
        dKV_accumulate: cutlass.Boolean = True,
        **others: Any,
    ) -> tuple[Any, Any]:
        """What the computing warps do with one query block: the mask only where it hides a pair."""
        n_block, aux_data = mask_fn.keywords["n_block"], mask_fn.keywords["aux_data"]
        hide = functools.partial(
            self._hide_invisible,
            n_block=n_block,
            end=aux_data.tensors[0],
            thr_mma=mask_fn.keywords["thr_mma"],
        )
        starts_below = m_block * self.tile_m >= (n_block + 1) * self.tile_n - 1
        if starts_below & ((m_block + 1) * self.tile_m <= aux_data.scalars[0]):
            consumer_state_Q, consumer_state_dO = FlashAttentionBackwardSm90.mma_one_m_block(
                self,
                m_block,
                consumer_state_Q,
                consumer_state_dO,
                mask_fn=None,
                dKV_accumulate=dKV_accumulate,
                **others,
            )
        else:
            consumer_state_Q, consumer_state_dO = FlashAttentionBackwardSm90.mma_one_m_block(
                self,
                m_block,
                consumer_state_Q,
                consumer_state_dO,
                mask_fn=hide,
                dKV_accumulate=dKV_accumulate,
                **others,
            )
        return consumer_state_Q, consumer_state_dO

    @cute.jit
    def _hide_invisible(self, acc_S, m_block, n_block, end, thr_mma):  # type: ignore[no-untyped-def]
        """The mask, all its loads ahead of their first use.

        Rows past the last one need no case of their own: they are after every query as keys, and
        after every end as queries.
        """
        swapped = self.SdP_swapAB
        shape = (self.tile_n, self.tile_m) if swapped else (self.tile_m, self.tile_n)
        query_mode, key_mode = (1, 0) if swapped else (0, 1)
        scores = layout_utils.reshape_acc_to_mn(acc_S, transpose=swapped)
        places = layout_utils.reshape_acc_to_mn(
            thr_mma.partition_C(cute.make_identity_tensor(shape)), transpose=swapped
        )
        num_queries, num_keys = (cute.size(scores, mode=[mode]) for mode in (0, 1))
        first_key, last_row = n_block * self.tile_n, end.shape[0] - 1
        ends = cute.make_rmem_tensor(num_keys, cutlass.Int32)
        for column in cutlass.range_constexpr(num_keys):
            key = first_key + places[0, column][key_mode]
            ends[column] = end[cutlass.min(key, last_row)]
        for row in cutlass.range_constexpr(num_queries):
            query = m_block * self.tile_m + places[row, 0][query_mode]
            for column in cutlass.range_constexpr(num_keys):
                key = first_key + places[0, column][key_mode]
                visible = (key <= query) & (query < ends[column])
                score = scores[row, column]
                scores[row, column] = score if visible else -cutlass.Float32.inf

    @cute.jit  # type: ignore[untyped-decorator]
    def dQaccum_store(  # noqa: N802, the library's name
        self,
        mdQaccum: cute.Tensor,
        sdQaccum: cute.Tensor,
        block_info: Any,
        TileSchedulerCls: cutlass.Constexpr[Callable[..., Any]],
        SeqlenInfoCls: cutlass.Constexpr[Callable[..., Any]],
        blocksparse_tensors: Any,
        mdQ_semaphore: cute.Tensor,
    ) -> None:
        """What the storing warp does: add each query block's gradients when its turn comes.

        The buffer is free for the next block once it has been read; the turn passes on once all of
        it has been added.
        """
        assert self.q_subtile_factor == 1, "a turn is one tile's, so list blocks of tile_m queries"
        lists = blocksparse_tensors
        assert lists.full_block_cnt is None, "full blocks belong among the masked ones"
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % cute.arch.WARP_SIZE
        tile_scheduler = TileSchedulerCls()
        work_tile = tile_scheduler.initial_work_tile_info()
        while work_tile.is_valid_tile:
            n_block, head_idx, batch_idx, _ = work_tile.tile_idx
            gdQaccum = cute.local_tile(
                mdQaccum[None, head_idx, batch_idx],
                (
                    cute.make_layout(
                        (self.tile_m * self.tile_hdim // self.num_wg_dQ, self.num_wg_dQ)
                    ),
                ),
                (None,),
            )
            turn_taken = mdQ_semaphore[None, None, head_idx, batch_idx]
            turns = lists.dq_write_order[batch_idx, head_idx, n_block, None]
            num_queries = lists.mask_block_cnt[batch_idx, head_idx, n_block]
            if num_queries > 0:
                self._free_buffer()
            first_m_block, next_turn = self._first_query_block(n_block), turns[0]
            for entry in cutlass.range(num_queries, unroll=1):
                m_block, turn = first_m_block + entry, next_turn
                taken = turn_taken[(m_block, None)].iterator
                barrier.wait_eq(taken, lane, 0, turn)
                self._start_adding(m_block, sdQaccum, gdQaccum)
                if entry + 1 < num_queries:  # loaded while the addition runs
                    next_turn = turns[entry + 1]
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                if entry + 1 < num_queries:
                    self._free_buffer()
                cute.arch.cp_async_bulk_wait_group(0, read=False)
                barrier.arrive_inc(taken, lane, 0, 1)
            tile_scheduler.advance_to_next_work()
            work_tile = tile_scheduler.get_current_work()

    @cute.jit
    def _free_buffer(self):  # type: ignore[no-untyped-def]
        """Let the computing warps write the next block's gradients."""
        for warp_group in cutlass.range_constexpr(self.num_wg_dQ):
            cute.arch.barrier_arrive(
                barrier_id=int(NamedBarrierBwd.dQEmptyWG0) + warp_group,
                number_of_threads=self.num_threads_per_warp_group + cute.arch.WARP_SIZE,
            )

    @cute.jit
    def _start_adding(self, m_block, sdQaccum, gdQaccum):  # type: ignore[no-untyped-def]
        """Add each warp group's part as soon as it is in the buffer."""
        for warp_group in cutlass.range_constexpr(self.num_wg_dQ):
            cute.arch.barrier(
                barrier_id=int(NamedBarrierBwd.dQFullWG0) + warp_group,
                number_of_threads=self.num_threads_per_warp_group + cute.arch.WARP_SIZE,
            )
            with cute.arch.elect_one():
                copy_utils.cpasync_reduce_bulk_add_f32(
                    sdQaccum[None, warp_group].iterator,
                    gdQaccum[(None, warp_group), m_block].iterator,
                    self.tma_copy_bytes["dQ"],
                )
            cute.arch.cp_async_bulk_commit_group()


def _backward_in_turns() -> Callable[..., Any]:
    """The library's host function with BackwardInTurns for its kernel: a copy, nothing patched.

    Compilations go to a cache of their own, named by this file, since the library may keep caches
    on disk and knows only its own sources.
    """
    library = interface._flash_attn_bwd
    names = {**library.__globals__, "FlashAttentionBackwardSm90": BackwardInTurns}
    backward = types.FunctionType(
        library.__code__, names, library.__name__, library.__defaults__, library.__closure__
    )
    backward.__kwdefaults__ = library.__kwdefaults__
    names["_flash_attn_bwd"] = backward
    this_file = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    backward.compile_cache = get_jit_cache(f"harts_bwd_{this_file}")  # type: ignore[attr-defined]
    return backward


_hopper_backward = _backward_in_turns()


def forward(
    q_PHD: torch.Tensor,
    k_PGD: torch.Tensor,
    v_PGV: torch.Tensor,
    end: torch.Tensor,
    partial: BlockList,
    full: BlockList,
    *,
    blocks: tuple[int, int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (P, H, V) and log-sum-exp, float32 (1, H, P). Lists of key blocks by query block.

    blocks: rows of a query block and of a key block. end: int32 (P,).
    """
    out, lse, *_ = interface._flash_attn_fwd(
        *(x.unsqueeze(0) for x in (q_PHD, k_PGD, v_PGV)),
        softmax_scale=scale,
        mask_mod=_visible,
        aux_tensors=[end],
        block_sparse_tensors=BlockSparseTensorsTorch(
            *_for_all_heads(partial.counts, partial.indices, full.counts, full.indices),
            block_size=blocks,
        ),
        return_lse=True,  # always, or evaluation would compile a kernel of its own
        pack_gqa=False,  # blocks of rows, not of rows times heads
    )
    return out.squeeze(0), lse


def backward(
    q_PHD: torch.Tensor,
    k_PGD: torch.Tensor,
    v_PGV: torch.Tensor,
    out_PHV: torch.Tensor,
    d_out_PHV: torch.Tensor,
    lse: torch.Tensor,
    end: torch.Tensor,
    queue: QueuedLists,
    *,
    blocks: tuple[int, int],
    scale: float,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v. The queue lists query blocks by key block.

    deterministic: query gradients are summed in the queue's turns, and key gradients of grouped
    heads head by head; otherwise in the order of arrival.
    """
    in_turns = deterministic and torch.cuda.get_device_capability(q_PHD.device) == (9, 0)
    assert not (in_turns and queue.full), "this kernel wants one list"
    run = _hopper_backward if in_turns else interface._flash_attn_bwd
    gradients = run(
        *(x.unsqueeze(0) for x in (q_PHD, k_PGD, v_PGV, out_PHV, d_out_PHV)),
        lse,
        softmax_scale=scale,
        deterministic=deterministic,
        mask_mod=_visible,
        aux_tensors=[end, queue.whole_until] if in_turns else [end],
        block_sparse_tensors=_query_lists(queue, blocks, deterministic),
    )
    d_q, d_k, d_v = (x.squeeze(0) for x in gradients)
    return d_q, d_k, d_v


def _query_lists(
    queue: QueuedLists, blocks: tuple[int, int], deterministic: bool
) -> BlockSparseTensorsTorch:
    masked, full = queue.masked, queue.full
    optional: dict[str, Any] = {}
    if full is not None:
        counts, indices = _for_all_heads(full.counts, full.indices)
        optional |= {"full_block_cnt": counts, "full_block_idx": indices}
    if deterministic:
        (turns,) = _for_all_heads(queue.masked_turns)
        optional |= {"dq_write_order": turns, "spt": True}
    if deterministic and queue.full_turns is not None:
        (optional["dq_write_order_full"],) = _for_all_heads(queue.full_turns)
    return BlockSparseTensorsTorch(
        *_for_all_heads(masked.counts, masked.indices), block_size=blocks, **optional
    )


def _for_all_heads(*lists: torch.Tensor) -> list[torch.Tensor]:
    """With the library's dimensions for batch and heads in front, both of size 1."""
    return [x.unsqueeze(0).unsqueeze(0) for x in lists]


def num_compilations() -> int:
    """Kernels compiled so far in this process, for all calls of forward and backward."""
    functions: tuple[Any, ...] = (
        interface._flash_attn_fwd,
        interface._flash_attn_bwd,
        interface._bwd_preprocess,
        interface._bwd_postprocess_convert,
        _hopper_backward,
    )
    return sum(len(function.compile_cache.cache) for function in functions)
