"""Which layers each pipeline stage holds."""

from __future__ import annotations

from itertools import accumulate

Stages = list[list[range]]  # stage -> virtual chunk -> layers of the whole model


def stage_layers(depth: int, pp: int, vpp: int = 1, sizes: list[int] | None = None) -> Stages:
    """Layers of every chunk, as Megatron-Core places them: chunk v of stage s comes before chunk v of stage s + 1,
    and these before all chunks v + 1. 8 layers, pp 2, vpp 2: stage 0 holds {0,1} and {4,5}.

    `sizes` gives the layers of each stage (each a multiple of vpp), or of each of the pp * vpp chunks in the
    order of the layers. Without it they are even. ValueError naming what to change.
    """
    if sizes is None:
        if depth % (pp * vpp):
            raise ValueError(
                f"got {depth} layers for {pp} pipeline stages of {vpp} chunks; expected a multiple, or the layers of "
                f"each chunk, such as {','.join(map(str, balanced(depth, pp * vpp)))}; set them (--layers)"
            )
        sizes = [depth // pp] * pp
    if len(sizes) == pp and all(size % vpp == 0 for size in sizes):
        sizes = [size // vpp for size in sizes] * vpp
    if len(sizes) != pp * vpp or sum(sizes) != depth or min(sizes) < 0:
        raise ValueError(
            f"got layers {sizes} of each stage or chunk, {sum(sizes)} together; expected {pp} stages (multiples of "
            f"{vpp}) or {pp * vpp} chunks that add up to {depth}; correct the list"
        )
    ends = list(accumulate(sizes))
    chunks = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return [chunks[stage::pp] for stage in range(pp)]


def balanced(depth: int, chunks: int) -> list[int]:
    """Sizes that differ by at most one, the larger first."""
    return [depth // chunks + (chunk < depth % chunks) for chunk in range(chunks)]


def check_indexer_starts(stages: Stages, full: list[int]) -> None:
    """ValueError if a chunk starts on a layer that uses the selection of a layer before it (arXiv 2603.12201):
    selections do not travel between stages."""
    bad = [chunk[0] for chunks in stages for chunk in chunks if len(chunk) and chunk[0] not in full]
    if bad:
        every = [chunk for chunks in stages for chunk in chunks]
        sizes = legal_sizes(sum(map(len, every)), len(every), full)
        raise ValueError(
            f"got pipeline stages that start on layers {bad}, which share the indexer of an earlier layer; expected "
            f"each to start on a layer with its own ({', '.join(map(str, full[:12]))}, ...); set the layers of each "
            f"chunk (--layers){', such as ' + ','.join(map(str, sizes)) if sizes else ''}"
        )


def legal_sizes(depth: int, chunks: int, full: list[int]) -> list[int]:
    """Chunk sizes near the even ones whose starts are all in `full`; empty if there are none."""
    starts = [0]
    for chunk in range(1, chunks):
        open_starts = [layer for layer in full if layer > starts[-1]]
        if not open_starts:
            return []
        starts.append(min(open_starts, key=lambda layer: abs(layer - chunk * depth / chunks)))
    return [end - start for start, end in zip(starts, [*starts[1:], depth], strict=True)]
