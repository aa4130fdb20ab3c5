"""What a field's type cannot say: rules across fields, in Python and in CEL."""
