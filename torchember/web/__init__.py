"What a page of a run is made of: template, style, script, and uPlot with its licence"
