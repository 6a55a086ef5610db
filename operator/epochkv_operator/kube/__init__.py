"""Everything that speaks to the API server: client, watches, store, server-side apply, status writes, Lease, events."""
