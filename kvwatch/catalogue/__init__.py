"""What everything is called outside: metrics, alerts, and the PromQL built from them."""
