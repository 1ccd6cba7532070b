"""Ways in from other programs: many tasks, and more to come. Each is imported by its subcommand alone."""
