"""``python -m sdm_rt.cli``: the ``sdm-rt`` command without an installed script."""

from sdm_rt.cli import main

raise SystemExit(main())
