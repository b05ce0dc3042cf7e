"""The shapes whose plans are committed as tables: the cases of the speed comparison, decode, and edges."""

from __future__ import annotations

from sdm_rt.plan.shapes import DecodeShape, WriteReadShape

FLAGSHIP = WriteReadShape(2, 32768, 64, 64, 64, 1024, 65536)

WRITE_READ_CASES: dict[str, WriteReadShape] = {
    "small": WriteReadShape(1, 2048, 64, 32, 32, 1024, 4096),
    # "flagship, hot" differs in its indices alone, which no plan reads.
    "flagship": FLAGSHIP,
    "flagship_fp8_snapshot": WriteReadShape(2, 32768, 64, 64, 64, 1024, 65536, snapshot="fp8"),
    "flagship_int4_snapshot": WriteReadShape(2, 32768, 64, 64, 64, 1024, 65536, snapshot="int4"),
    "batch": WriteReadShape(8, 4096, 256, 128, 128, 1024, 65536),
    "7b": WriteReadShape(4, 8192, 128, 128, 128, 1024, 65536),
    "narrow": WriteReadShape(16, 4096, 64, 32, 32, 128, 16384),
    "float32": WriteReadShape(2, 4096, 64, 64, 64, 512, 65536, bank_dtype="float32"),
    "many_streams": WriteReadShape(64, 1024, 64, 32, 32, 64, 4096),
    "flagship_no_grad": WriteReadShape(2, 32768, 64, 64, 64, 1024, 65536, training=False),
    "one_token": WriteReadShape(1, 1, 1, 1, 1, 1, 1),
    "ragged": WriteReadShape(3, 65, 64, 5, 3, 100, 1000, gates_per_write=True, index_dtype="int32"),
    "odd_chunk": WriteReadShape(2, 100, 30, 7, 9, 1000, 333, bank_dtype="float16"),
    "wide": WriteReadShape(1, 512, 64, 256, 256, 16384, 65536),
    "largest_chunk": WriteReadShape(2, 1024, 256, 64, 64, 1024, 65536, bank_dtype="float32"),
    "float32_gradient": WriteReadShape(2, 1024, 64, 64, 64, 1024, 65536, gradient_bank_dtype="float32"),
    "bf16_snapshot": WriteReadShape(2, 1024, 64, 64, 64, 1024, 65536, bank_dtype="float32", snapshot="bf16"),
    "long": WriteReadShape(2, 4_194_304, 64, 256, 64, 64, 65536),
    "no_tokens": WriteReadShape(2, 0, 64, 64, 64, 1024, 65536),
    "no_streams": WriteReadShape(0, 64, 64, 64, 64, 1024, 65536),
}

DECODE_CASES: dict[str, DecodeShape] = {
    "decode_1": DecodeShape(1, 64, 64, 1024),
    "decode_2": DecodeShape(2, 64, 64, 1024),
    "decode_16": DecodeShape(16, 64, 64, 1024),
    "decode_64": DecodeShape(64, 64, 64, 1024),
    "decode_float32": DecodeShape(16, 32, 32, 512, bank_dtype="float32"),
    "decode_float16": DecodeShape(4, 128, 16, 128, bank_dtype="float16", index_dtype="int32"),
    "decode_widest": DecodeShape(2, 256, 256, 16384, gates_per_write=True),
    "decode_odd_columns": DecodeShape(3, 7, 1, 100),
    "decode_one_column": DecodeShape(1, 1, 1, 1, bank_dtype="float32"),
    "decode_unaligned": DecodeShape(16, 64, 64, 1024, aligned=False),
    "decode_no_streams": DecodeShape(0, 64, 64, 1024),
}
