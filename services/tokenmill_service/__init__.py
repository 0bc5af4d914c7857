"""What the shells of both services share: flags, addresses, TLS, logs. Must not know: requests, plans, models, either service."""
