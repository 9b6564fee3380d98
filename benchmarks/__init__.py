"""Programs that measure this project. They are not packaged, and no other part of the project imports them (README.md)."""

import specdec  # noqa: F401  # says how OpenMP's threads wait, which torch reads when it is imported
