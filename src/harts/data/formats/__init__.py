"""One file a format, one public function each: `read_<format>` yields (row, source) pairs."""
