"Callbacks that record trainings of other libraries, one Python module for each library."
