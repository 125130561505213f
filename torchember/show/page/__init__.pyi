from .document import report as report
