"""What of a run goes to trackers that people already use"""
