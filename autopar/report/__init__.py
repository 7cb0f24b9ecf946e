"""Plans for people: tables, later diagrams and traces. Nothing here decides anything."""
