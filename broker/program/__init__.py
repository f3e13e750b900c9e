"""The needs of every command beside its work: settings, exit codes, files on a failing disk, a processor's quirks."""
