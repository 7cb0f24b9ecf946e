"""Plans beside references: those of Alpa (`alpa`), published figures (`published`), plans by hand (`named`)."""
