"""Tools: functions that a model may call with the user's consent."""
