"""The site's pages, made from cards and evidence."""
