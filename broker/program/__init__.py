"""What every command needs beside its work: settings, exit codes, files on a failing disk, the processor's quirks."""
