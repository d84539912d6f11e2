"""What goes into the ENGINE's venv, as data of this wheel: the plugin's source, locks and patches. Never imported."""
