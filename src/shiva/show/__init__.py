"""What people look at: the demo, the server, the report page, and the figures on them."""
