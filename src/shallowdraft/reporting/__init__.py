"""The report: one page that is made from a run's records alone. No torch here."""
