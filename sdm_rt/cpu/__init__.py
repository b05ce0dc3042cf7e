"""The definition in torch: the recurrence and the product-key top-k for any torch device."""
