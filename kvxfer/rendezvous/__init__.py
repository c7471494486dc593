"""What a daemon decides, without doing any of it: who is linked, what is posted, who has claimed it, who must be told.

All of it is pure: time comes in as an argument, the outcome is a list of `actions` that `kvxfer.daemon` carries out.
"""
