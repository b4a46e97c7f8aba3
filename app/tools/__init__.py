"""Tools: functions that a model may call, each with its user's consent."""
