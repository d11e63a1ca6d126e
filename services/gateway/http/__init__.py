"""The public port: routes, handlers, and how bytes leave."""
