"""Row functions: `normalize` and its named forms, their temperature limits, derivatives and losses."""
