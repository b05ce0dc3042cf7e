"""Operations: argument checks, the write-read op, decode and product-key top-k."""
