"""Plans beside reference plans: those of Alpa (`alpa`), published figures (`published`), plans entered by hand (`named`)."""
