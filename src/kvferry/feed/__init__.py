"""What a node tells routers: one numbered stream of what is where, and what each request was found to be."""
