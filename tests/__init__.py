"""A package, not a folder of them: the wheel of verl brings a package `tests` of its own, which would be found before a mere folder."""
