from harts.ops.gather.api import gather_rows, own_rows

__all__ = ["gather_rows", "own_rows"]
