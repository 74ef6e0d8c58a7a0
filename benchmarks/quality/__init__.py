"""What each design choice costs in answers: tables of precision, restoring, working memory and sharing."""
