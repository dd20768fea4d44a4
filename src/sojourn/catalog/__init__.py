"""Facts about GPUs, platforms, prices, models and data sets as TOML with sources and dates, and typed readers."""
