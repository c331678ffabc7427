"""Operations and their backends: names, lazy imports, refusals, and the order in which `auto` tries them."""
