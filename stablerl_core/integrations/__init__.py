"""The same functions inside other people's trainers. Nothing else of the package imports this."""
