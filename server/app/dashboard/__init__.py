"""`/dashboard`: a page that shows the running engine, and the JSON that feeds it.

The page is static and holds no data, so it needs no key; `/dashboard/data` does. Nothing is
computed while nobody looks.
"""
