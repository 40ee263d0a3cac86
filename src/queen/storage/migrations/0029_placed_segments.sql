-- Segments of a staged batch get their offsets by an update, under the locks of their partitions. A move finds them as it
-- finds what is pushed, so they are not noted as rewritten: looking for moves took four fifths of the update. The function
-- is replaced and not the trigger, since that would lock the segments.
CREATE OR REPLACE FUNCTION queen.note_rewritten_segment() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.partition_id = OLD.partition_id THEN
        INSERT INTO queen.rewritten_segments SELECT NEW.partition_id, NEW.base_offset
        WHERE EXISTS (SELECT FROM queen.moves WHERE kind = 'queue') ON CONFLICT DO NOTHING;
    END IF;
    RETURN NULL;
END $$;
