"""Questions to tables in SQL: DuckDB reads the rows of any dialect as its own, without a conversion."""
