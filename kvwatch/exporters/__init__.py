"""Show the last report: Prometheus, JSON, events, status page."""
