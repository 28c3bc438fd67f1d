"""What a person looks at: figures as plain records first, drawn second; and a live page."""
