"""docs/performance.md from the records of docs/records: ``python -m tests.performance_page``."""
