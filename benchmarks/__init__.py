"""Programs that measure this project. They are not packaged, and the project does not import them (README.md)."""

import specdec  # noqa: F401  # says how OpenMP's threads wait, which torch reads when it is imported
